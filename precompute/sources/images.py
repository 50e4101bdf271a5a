"""Files of a source by name, and what reads them from others."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import BinaryIO

from precompute.sources.listing import Listing, Samples
from precompute.sources.place import Located, Place

Names = tuple[str, ...]
"""File names; or of a tree, the first name of a part and of the next, "" where it is open."""

ALL: Names = ()


class Images(ABC):
    """Reads images, or videos, by name; several threads call it.

    The `place` of a file is where `locate` found it, perhaps long ago.
    """

    fetches_ahead = False
    """Whether files come over a network, whole, and those that are expected are fetched ahead."""

    @abstractmethod
    def locate(self, name: str) -> Located:
        """Find a file without reading it, while planning."""

    @abstractmethod
    def read(self, name: str, place: Place | None = None) -> bytes:
        """Read the file's bytes; raise Rejected if that is impossible."""

    def read_head(self, name: str, place: Place | None = None) -> bytes:
        """Read the first HEADER_BYTES of a file, unchecked; or all of it, where that is as quick."""
        return self.read(name, place)

    def open(self, name: str, place: Place | None = None) -> BinaryIO:
        """Open a file as a stream that can seek: in place where that is possible, else read whole first."""
        return BytesIO(self.read(name, place))

    def expect(self, names: Iterable[str]) -> None:  # noqa: B027 (most files are not fetched ahead)
        """Learn which files will be read, once each and roughly in this order."""


class ImageStore(Images):
    @abstractmethod
    def listing(self) -> Listing:
        """List every file's name, and what else is there; raise SourceError if a folder cannot be listed."""

    @abstractmethod
    def version(self) -> str | None:
        """Return a string that changes when anything is written there; None if that takes a look at every image."""


class Source(Images):
    """A source of samples, and of their files by uri."""

    def parts(self, rows: int) -> Sequence[Names]:
        """Return the names of parts of some `rows` samples, each to be listed alone; by default, one of all."""
        return [ALL]

    @abstractmethod
    def samples(self, part: Names = ALL) -> Samples:
        """List the samples of a part, or every sample, in an order that stays the same; count the files skipped."""

    @abstractmethod
    def version(self, part: Names = ALL) -> str | None:
        """Return a string that changes when a file of a part is written, added or removed; None if that takes a look at
        every image.
        """

    def list_version(self) -> str:
        """Return a string that changes with the list of samples, as far as no look at each is needed."""
        return self.version() or ""


class ImagesOf(Images):
    def __init__(self, images: Images) -> None:
        self.images, self.fetches_ahead = images, images.fetches_ahead

    def locate(self, name: str) -> Located:
        return self.images.locate(name)

    def read(self, name: str, place: Place | None = None) -> bytes:
        return self.images.read(name, place)

    def read_head(self, name: str, place: Place | None = None) -> bytes:
        return self.images.read_head(name, place)

    def open(self, name: str, place: Place | None = None) -> BinaryIO:
        return self.images.open(name, place)

    def expect(self, names: Iterable[str]) -> None:
        self.images.expect(names)
