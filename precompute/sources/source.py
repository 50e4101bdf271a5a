"""The interface of a source; a new kind is a class with these three methods and a line in SOURCES."""

from typing import Protocol

from precompute.sources.listing import Samples


class Source(Protocol):
    def samples(self) -> Samples:
        """List every sample, and what was passed over."""

    def fingerprint(self, uri: str, /) -> str:
        """Return what changes when an image changes, without reading it."""

    def read(self, uri: str, /) -> bytes:
        """Read an image file's bytes; Rejected where there are none. Called from several threads."""
