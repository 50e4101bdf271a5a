"""The public names of the three programs. Each is imported at its first use, so that reading needs no torch."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cache_store.errors import ConfigError
from cache_store.version import __version__

if TYPE_CHECKING:
    from cache_store import (
        Cache,
        CacheError,
        EncodeOnceError,
        JoinedCache,
        denormalize,
        normalize,
        open_cache,
        open_joined,
        time_ids,
    )
    from precompute.encode_images import encode_images
    from trainer import LatentStream, MixedStream, caption_dropped, load_projector, sample_posterior

HOMES = {
    "Cache": "cache_store",
    "CacheError": "cache_store",
    "EncodeOnceError": "cache_store",
    "JoinedCache": "cache_store",
    "LatentStream": "trainer",
    "MixedStream": "trainer",
    "caption_dropped": "trainer",
    "denormalize": "cache_store",
    "encode_images": "precompute.encode_images",
    "load_projector": "trainer",
    "normalize": "cache_store",
    "open_cache": "cache_store",
    "open_joined": "cache_store",
    "sample_posterior": "trainer",
    "time_ids": "cache_store",
}

__all__ = [
    "Cache",
    "CacheError",
    "EncodeOnceError",
    "JoinedCache",
    "LatentStream",
    "MixedStream",
    "__version__",
    "caption_dropped",
    "denormalize",
    "encode_images",
    "load_projector",
    "normalize",
    "open_cache",
    "open_joined",
    "sample_posterior",
    "time_ids",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name in HOMES:
        found = globals()[name] = getattr(import_ours(HOMES[name]), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def import_ours(module: str) -> ModuleType:
    """Import a module of a program; ConfigError if Python finds another project's package of the program's name."""
    package = module.partition(".")[0]
    ours = Path(__file__).parents[1] / package / "__init__.py"
    spec = find_spec(package)
    found = spec.origin if spec else None
    # An index has other projects with packages `trainer` and `precompute`; pip puts one over the other without a word.
    if found != str(ours) or "from cache_store" not in ours.read_text(encoding="utf-8"):
        raise ConfigError(
            f"{found or 'nothing'} is found in place of encode-once's package `{package}`: rename it, or uninstall the "
            "project that brings it; then run `pip install --force-reinstall --no-deps encode-once`"
        )
    return import_module(module)
