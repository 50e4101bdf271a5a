"""The interface of a source; a new kind is a class with `samples`, `fingerprint`, `read` and a line in SOURCES."""

from typing import Protocol

from precompute.sources.image_store import Images
from precompute.sources.listing import Samples


class Source(Images, Protocol):
    """Samples, and their images by uri."""

    def samples(self) -> Samples:
        """List every sample, and what was passed over."""
