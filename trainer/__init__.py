"""Train a projector from a cache of latents for a frozen language model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cache_store.version import __version__

if TYPE_CHECKING:
    from trainer.data.draws import caption_dropped, sample_posterior
    from trainer.data.mixed import MixedStream
    from trainer.data.stream import LatentStream
    from trainer.run.load_projector import load_projector

HOMES = {
    "LatentStream": "trainer.data.stream",
    "MixedStream": "trainer.data.mixed",
    "caption_dropped": "trainer.data.draws",
    "load_projector": "trainer.run.load_projector",
    "sample_posterior": "trainer.data.draws",
}

__all__ = ["LatentStream", "MixedStream", "__version__", "caption_dropped", "load_projector", "sample_posterior"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `trainer --help` does not import torch."""
    if name in HOMES:
        found = globals()[name] = getattr(import_module(HOMES[name]), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
