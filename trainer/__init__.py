"""Trains a projector from a cache of latents into a frozen language model."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.data.stream import LatentStream

__all__ = ["LatentStream"]


def __getattr__(name: str) -> Any:
    """Import torch only for those who ask for it: `trainer --help` does not."""
    if name == "LatentStream":
        from trainer.data.stream import LatentStream

        return LatentStream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
