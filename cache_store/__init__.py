"""The cache of latents: its records, its bytes, and how to read and verify it. Needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cache_store.version import __version__

if TYPE_CHECKING:
    from cache_store.cache.joined import JoinedCache as JoinedCache
    from cache_store.cache.joined import open_joined as open_joined
    from cache_store.cache.reader import Cache as Cache
    from cache_store.cache.reader import open_cache as open_cache
    from cache_store.conditioning import time_ids as time_ids
    from cache_store.errors import CacheError as CacheError
    from cache_store.errors import EncodeOnceError as EncodeOnceError
    from cache_store.format.normalization import denormalize as denormalize
    from cache_store.format.normalization import normalize as normalize

HOMES = {
    "Cache": "cache_store.cache.reader",
    "CacheError": "cache_store.errors",
    "EncodeOnceError": "cache_store.errors",
    "JoinedCache": "cache_store.cache.joined",
    "denormalize": "cache_store.format.normalization",
    "normalize": "cache_store.format.normalization",
    "open_cache": "cache_store.cache.reader",
    "open_joined": "cache_store.cache.joined",
    "time_ids": "cache_store.conditioning",
}

__all__ = ["__version__", *HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: programs then start, and react to Ctrl-C, before numpy and Arrow load."""
    if name in HOMES:
        found = globals()[name] = getattr(import_module(HOMES[name]), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
