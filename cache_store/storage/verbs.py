"""A store: eight verbs on files by name, and what follows from them. A wrapper of a store is a store.

`stat`, `read`, `fetch`, `list`, `walk`, `put_whole`, `put_if_absent` and `delete` are all that a place has to know:
`RemoteStore` opens, maps and drafts files by them.
"""

import io
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import BinaryIO, NamedTuple, Protocol, Self

from cache_store.errors import ConfigError
from cache_store.storage.files import MAX_READ_BYTES

Data = bytes | memoryview


class Version(NamedTuple):
    """Identifies the content of a file: another version has other bytes, or was written anew."""

    size: int
    """In bytes."""
    mark: str
    """The time of modification in nanoseconds, or what a store gives each content: its ETag."""
    touched: str = ""
    """Where the place knows it, when anything of the file changed; not compared."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self[:2] == other[:2]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:2])

    def __str__(self) -> str:
        return f"{self.size}:{self.mark}"

    @property
    def stamp(self) -> str:
        """The version, and what shows that somebody wrote to the file and set its time back."""
        return ":".join(filter(None, (str(self), self.touched)))


class Ranges(NamedTuple):
    """Byte ranges of one file, with what is known of the whole file."""

    name: str
    starts: Sequence[int]
    lengths: Sequence[int]
    size: int = 0
    """In bytes; known where `sha256` is."""
    sha256: str = ""
    """Under which parts of the file may be kept."""
    version: Version | None = None
    """The one that every range has to be of."""


class Draft(Protocol):
    """A file that is written and checked before it gets its name; without `publish`, it is deleted."""

    @property
    def stream(self) -> BinaryIO:
        """The stream to write to."""

    def writing(self) -> AbstractContextManager[BinaryIO]:
        """Give the stream; an OSError inside names the file, or the folder of temporary files if that disk failed."""

    def finish(self) -> None:
        """Bring what was written to the disk."""

    def map(self) -> memoryview:
        """Return the bytes written, read back."""

    def publish(self) -> None:
        """Give the file its name, durably, and replace a file of that name."""

    def publish_if_absent(self) -> bool:
        """Give the file its name, durably, unless another file has it; return as `put_if_absent` does."""


class File(io.BufferedReader):
    """An open file of a store: a stream for one thread, parts for several. ChangedError once it is another version."""

    def __init__(self, raw: io.RawIOBase, where: str, version: Version) -> None:
        super().__init__(raw)
        self.where, self.version = where, version

    def __del__(self) -> None:
        if "version" in vars(self):  # else it was never opened
            self.close()

    def __str__(self) -> str:
        return self.where

    @abstractmethod
    def part(self, start: int, length: int) -> bytes:
        """Return bytes of the file; fewer at its end."""

    @abstractmethod
    def again(self) -> Self:
        """Open the same version of the file once more, at its beginning."""

    @abstractmethod
    def refuse_changed(self) -> None:
        """Raise ChangedError if what was read so far may be of several versions."""


class Store(Protocol):
    """Files by name: parts joined by slashes, as in `samples/000003.parquet`.

    Methods raise FileNotFoundError for a missing file, NotAFileError if something else is in its place, and OSError,
    naming the file, for every failure of disk or network; ConfigError for a write where `is_read_only`.
    """

    @property
    def is_remote(self) -> bool:
        """Whether each answer is waited for, so that many calls are best made at the same time."""
        return True

    @property
    def is_read_only(self) -> bool:
        """Whether every write is refused."""
        return False

    @property
    def keeps_others_out(self) -> bool:
        """Whether an exclusive claim excludes other writers."""
        return False

    @abstractmethod
    def __str__(self) -> str:
        """Return the store's address as a user would type it."""

    @abstractmethod
    def stat(self, name: str) -> Version:
        """Return the version of a file as it is now."""

    @abstractmethod
    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        """Return the whole of a small file; TooLargeError, and nothing is read, if it is larger than `at_most`."""

    @abstractmethod
    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        """Return byte ranges of files, each whole, many requests at a time.

        OSError with ENODATA if a file seems too short; ChangedError if it is not of the version that is wanted.
        """

    @abstractmethod
    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        """Yield every file below, in folders too, with its version where that costs nothing more.

        A link to a folder, which is not followed, is a name that ends in /. A remote store yields names in order, those
        behind `after`.
        """

    @abstractmethod
    def put_whole(self, name: str, data: Data) -> None:
        """Write a file, durably: whole, or what was there before stays."""

    @abstractmethod
    def put_if_absent(self, name: str, data: Data) -> bool:
        """Write a file as `put_whole` does unless it exists; return whether it now holds these bytes.

        So True also where another wrote the same bytes before: a request that is repeated may meet its own success.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file durably, if it exists."""

    @abstractmethod
    def open(self, name: str, version: Version | None = None) -> File:
        """Open a file, as it is now or in a version that is known; a ChangedError may come only once it is read."""

    @abstractmethod
    def map(self, name: str) -> memoryview:
        """Return a file's bytes, paged in as they are touched; a remote file is first copied to this machine."""

    @abstractmethod
    def draft(self, name: str, attempt: int = 1) -> AbstractContextManager[Draft]:
        """Begin a large file."""

    def where(self, name: str) -> str:
        """Return a file's whole address, for messages."""
        return f"{self}/{name}" if name else str(self)

    def has(self, name: str) -> bool:
        """Return whether there is anything of that name, a file or not."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return bool(self.list(name))
        return True

    def size(self, name: str) -> int:
        """Return the size of a file, in bytes."""
        return self.stat(name).size

    def clear_drafts(self, name: str) -> int:
        """Delete drafts of this file that dead programs left; return the number of the next attempt, from 1."""
        return 1

    def refuse_others(self, ours: Collection[str], option: str, kind: str) -> None:
        """Raise ConfigError, naming the option, if it can be no folder or its top level holds names not in `ours`."""
        if foreign := sorted({name.rstrip("/") for name in self.list()} - set(ours)):
            raise ConfigError(f"{option}: {self} holds {foreign[0]!r} but no {kind}; name an empty or a new folder")

    def claim(self, *, shared: bool = False) -> AbstractContextManager[None]:
        """Claim the store for writing, exclusively or shared; CacheError, naming the holder, if it is taken."""
        return nullcontext()

    def free_bytes(self) -> int | None:
        """Return the bytes that can still be written; None where that is not known."""
        return None

    def contains(self, other: "Store") -> bool:
        """Return whether another store is this one or lies within it."""
        return f"{other}/".startswith(f"{self}/")

    def absolute(self) -> Self:
        """Return the store as a program in any working folder names it."""
        return self

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Return the sorted names of what is directly in a folder, without the folder's own; a folder's name ends in /.

        An absent folder gives an empty list; raises NotADirectoryError if a file is in its place.
        """


def read_only(where: str) -> ConfigError:
    """Return the error for a write into a store that can only be read."""
    return ConfigError(f"{where} can only be read; name a folder, or a URL of an object store")
