"""The console scripts of the programs; unlike `python -m`, they say so if another project's package hides ours."""

from cache_store.program.start import start
from encode_once import import_ours


def precompute() -> int:
    """Run `precompute` and return its exit code."""
    return start("precompute", "precompute.cli", import_ours)


def cache_store() -> int:
    """Run `cache-store` and return its exit code."""
    return start("cache-store", "cache_store.cli", import_ours)


def trainer() -> int:
    """Run `trainer` and return its exit code."""
    return start("trainer", "trainer.cli", import_ours)
