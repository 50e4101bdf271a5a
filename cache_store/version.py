"""The version of all three programs; setup.cfg takes it from here."""

__version__ = "0.1.0"
