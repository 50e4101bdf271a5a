"""Runs a frozen encoder over every image, into a sealed cache."""

from cache_store.version import __version__

__all__ = ["__version__"]
