"""The public names of the three programs. Each is imported at its first use, so that reading needs no torch."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cache_store.errors import ConfigError, install
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


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name on first use; ModuleNotFoundError names the extra that it needs."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = globals()[name] = getattr(import_ours(HOMES[name]), name)
    except ModuleNotFoundError as error:
        extra = HOMES[name].partition(".")[0].replace("cache_store", "")
        raise ModuleNotFoundError(f"{name} of encode_once: {error}; run {install(extra)}", name=error.name) from error
    return found


def import_ours(module: str) -> ModuleType:
    """Import a module of a program; ConfigError if Python finds another project's package of the program's name."""
    package = module.partition(".")[0]
    ours = Path(__file__).parents[1] / package / "__init__.py"
    spec = find_spec(package)
    found = spec.origin if spec else None
    restore = "run `pip install --force-reinstall --no-deps encode-once`"
    if found is None:
        raise ConfigError(f"encode-once's package `{package}` is missing; {restore}")
    # An index has other projects with packages `trainer` and `precompute`; pip puts one over the other without a word.
    if found != str(ours) or "from cache_store" not in ours.read_text(encoding="utf-8"):
        problem = f"`{package}` is another project's, not encode-once's: {found}"
        raise ConfigError(f"{problem}; rename that, or uninstall its project and {restore}")
    return import_module(module)
