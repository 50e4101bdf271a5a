"""A store: eight verbs on files by name, and the methods that follow from them.

A remote place implements `stat`, `read`, `fetch` (a `UrlStore`: `_fetch_file`), `list`, `walk`, `put_whole`,
`put_if_absent` and `delete`; `RemoteStore` opens, maps and drafts files with these.
"""

import errno
import io
import os
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, Self

from cache_store.errors import ChangedError, ConfigError, TooLargeError
from cache_store.storage.files import map_file

MAX_READ_BYTES = 128 * 2**20
"""Default bound of a file that is read whole; a seal of a million shards takes 80 MB."""

Data = bytes | memoryview


@dataclass(frozen=True)
class Version:
    """Identifies a file's content; a file that is written again may get a new one, even with equal bytes."""

    size: int
    """In bytes."""
    mark: str
    """Modification time in nanoseconds, or the ETag or hash of the content."""
    touched: str = field(default="", compare=False)
    """Time of the last change to file or attributes (ctime), if known."""

    def __str__(self) -> str:
        return f"{self.size}:{self.mark}"

    @property
    def stamp(self) -> str:
        """The version and `touched`, which tells a changed file whose modification time was set back."""
        return ":".join(filter(None, (str(self), self.touched)))


class Ranges(NamedTuple):
    """Byte ranges of one file, and what is known of the whole file."""

    name: str
    starts: Sequence[int]
    lengths: Sequence[int]
    size: int = 0
    """In bytes; set if `sha256` is."""
    sha256: str = ""
    """The recorded SHA-256; blocks of the file may be kept under it."""
    version: Version | None = None
    """The version that every range must come from; None for any."""


@dataclass(frozen=True)
class Draft:
    """A local scratch file, which is written and checked before it gets its name in a store."""

    store: "Store"
    name: str
    scratch: Path
    stream: BinaryIO

    def finish(self) -> None:
        self.stream.flush()
        self.store.sync(self.stream.fileno())

    def map(self) -> memoryview:
        return map_file(self.scratch)

    def publish(self) -> None:
        """Give the file its name, durably; replace a file of that name."""
        self.store.put_file(self.name, self.scratch)

    def publish_if_absent(self) -> bool:
        """Give the file its name, durably, unless another file has it; return the same as `put_if_absent`."""
        return self.store.put_file_if_absent(self.name, self.scratch)


class File(io.BufferedReader):
    """An open file of a store: a stream for one thread, `part` for any number of threads.

    Reading raises ChangedError if the file is no longer the version that was opened.
    """

    def __init__(self, raw: io.RawIOBase, where: str, version: Version, buffer_bytes: int = 8_192) -> None:
        super().__init__(raw, buffer_bytes)
        self.where, self.version = where, version

    def __del__(self) -> None:
        if "version" in vars(self):  # otherwise the constructor failed
            self.close()

    def __str__(self) -> str:
        return self.where

    @abstractmethod
    def part(self, start: int, length: int) -> bytes:
        """Return `length` bytes of the file from `start`; fewer at its end."""

    @abstractmethod
    def reopen(self) -> Self:
        """Open the same version of the file again, at its beginning."""

    @abstractmethod
    def refuse_changed(self) -> None:
        """Raise ChangedError if the bytes read so far may come from several versions."""


class Store(Protocol):
    """Files by name: parts joined by slashes, as in `samples/000003.parquet`; other processes see what is written.

    Methods raise FileNotFoundError for a missing file, NotAFileError if something else is in its place, and OSError,
    naming the file, for every failure of disk or network. Writes raise ConfigError if `is_read_only`.
    """

    @property
    def is_remote(self) -> bool:
        """Whether calls wait for a network, so that many should be made at the same time."""
        return True

    @property
    def is_read_only(self) -> bool:
        return False

    @property
    def has_exclusive_claims(self) -> bool:
        """Whether an exclusive claim keeps other writers out."""
        return False

    @abstractmethod
    def __str__(self) -> str:
        """Return the store's address as a user would type it."""

    @abstractmethod
    def stat(self, name: str) -> Version:
        """Return the current version of a file."""

    @abstractmethod
    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        """Return the whole of a small file; TooLargeError, without reading it, if it is larger than `at_most` bytes."""

    @abstractmethod
    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        """Return whole byte ranges of files; remote stores make many requests at a time.

        OSError with ENODATA if a file seems too short; ChangedError if it is another version than the wanted one.
        """

    @abstractmethod
    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        """Yield the names of all files, in subfolders too; only a local store may leave out their versions.

        A link to a folder is not followed; its name ends in /. A remote store yields names in order, beginning behind
        `after`, each with its version: a `ListedStore` takes a name without one for no file.
        """

    @abstractmethod
    def put_whole(self, name: str, data: Data) -> None:
        """Write a file durably, whole or not at all; replace a file of that name."""

    @abstractmethod
    def put_if_absent(self, name: str, data: Data) -> bool:
        """Write a file as `put_whole` does unless it exists; return whether it now holds these bytes.

        True also if the file held the same bytes before: a repeated request may find its own earlier success.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, if it exists, and make that durable.

        By a name that ends in /, an empty folder, where a place has folders.
        """

    @abstractmethod
    def open(self, name: str, version: Version | None = None) -> File:
        """Open a file in its current or a known version; a ChangedError may come only when it is read."""

    @abstractmethod
    def map(self, name: str) -> memoryview:
        """Return a file's bytes, paged in as they are touched; a remote file is first copied to this machine."""

    @abstractmethod
    def draft(self, name: str, attempt: int = 1) -> AbstractContextManager[Draft]:
        """Create a draft of a large file; unless it is published, it is deleted."""

    def put_file(self, name: str, scratch: Path) -> None:
        """Give a scratch file, which its draft has finished, its name; it need not be left where it was."""
        self.put_whole(name, map_file(scratch))

    def put_file_if_absent(self, name: str, scratch: Path) -> bool:
        """Do so unless another file has the name; return the same as `put_if_absent`."""
        return self.put_if_absent(name, map_file(scratch))

    def make_durable(self, name: str) -> None:
        """Make a file's name survive a power cut, in place of a program that died after giving it."""
        return

    def sync(self, descriptor: int) -> None:
        """Flush a scratch file to disk, if it will stay there."""
        return

    def where(self, name: str) -> str:
        """Return a file's whole address, for messages."""
        return f"{self}/{name}" if name else str(self)

    def has(self, name: str) -> bool:
        try:
            self.stat(name)
        except FileNotFoundError:
            return bool(self.list(name))
        return True

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        return self.stat(name).size

    def clear_drafts(self, name: str) -> int:
        """Delete drafts that dead programs left; return the number of the next attempt, from 1."""
        return 1

    def refuse_foreign_names(self, ours: Collection[str], option: str, kind: str) -> None:
        """Raise ConfigError, naming the option, if the store is no folder or its top level has names not in `ours`."""
        if foreign := sorted({name.rstrip("/") for name in self.list()} - set(ours)):
            raise ConfigError(f"{option}: {self} holds {foreign[0]!r} but no {kind}; name an empty or a new folder")

    def claim(self, *, shared: bool = False) -> AbstractContextManager[None]:
        """Claim the store for writing, exclusively or shared; CacheError, naming the holder, if it is taken."""
        return nullcontext()

    def free_bytes(self) -> int | None:
        """Return how many more bytes can be written, if known."""
        return None

    def contains(self, other: "Store") -> bool:
        """Return whether another store is this one or lies within it."""
        return f"{other}/".startswith(f"{self}/")

    def absolute(self) -> Self:
        """Return the store under an address that does not depend on the working folder."""
        return self

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Return the sorted names of the files and folders directly in a folder; a folder's name ends in /.

        A missing folder gives an empty list; a file in its place, NotADirectoryError.
        """


def read_only_error(where: str) -> ConfigError:
    return ConfigError(f"{where} can only be read; name a folder, or a URL of an object store")


def missing_error(where: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)


def too_large_error(where: Path | str, size: int, at_most: int) -> TooLargeError:
    error = TooLargeError(f"{where} is {size:,} bytes, at most {at_most:,} can be")
    error.size = size
    return error


def changed_error(where: Path | str) -> ChangedError:
    return ChangedError(f"{where} was changed while it was read; restore it and run the same command again")


def cut_short_error(where: str) -> OSError:
    return OSError(errno.ENODATA, "answers are cut short, also when asked again", where)
