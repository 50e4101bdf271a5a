"""What a source of samples does; a new kind is a class with these three methods and a line in SOURCES."""

from typing import Protocol

from precompute.sources.listing import Samples


class Source(Protocol):
    def samples(self) -> Samples:
        """Every sample, and what was passed over."""

    def fingerprint(self, uri: str) -> str:
        """What changes when an image changes, known without reading it."""

    def read(self, uri: str) -> bytes:
        """An image file's bytes; Rejected where there are none. Called from several threads."""
