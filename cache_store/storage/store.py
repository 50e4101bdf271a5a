"""Where the files of a cache lie. Whatever reads or writes one does it through a `Store`."""

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol, TypeVar, runtime_checkable

from cache_store.errors import ConfigError
from cache_store.storage.files import MAX_READ_BYTES
from cache_store.storage.kept_blocks import Ranges
from cache_store.storage.local import LocalStore
from cache_store.storage.objects.client import SCHEMES
from cache_store.storage.objects.object_store import ObjectStore

URL = re.compile(r"[a-z][a-z0-9+.-]*:/", re.IGNORECASE)
"""Its beginning; of two slashes a Path has kept one."""

T = TypeVar("T")
R = TypeVar("R")


class Draft(Protocol):
    """A file that is whole and checked before it gets its name; without `publish` it leaves nothing."""

    @property
    def stream(self) -> BinaryIO:
        """To write it."""

    def writing(self) -> AbstractContextManager[BinaryIO]:
        """The same; what a disk refuses names the file, or the folder of temporary files if that is its disk."""

    def finish(self) -> None:
        """What was written is on the disk."""

    def map(self) -> memoryview:
        """What was written, read back."""

    def publish(self) -> None:
        """Give it its name, durably, in place of a file that has it."""

    def publish_if_absent(self) -> bool:
        """Give it its name, durably, unless a file has it; whether it was given."""


class Store(Protocol):
    """The files of a cache by name: parts joined by slashes, as `samples/000003.parquet`.

    FileNotFoundError where a file is wanted and nothing lies, NotAFileError where something else does, OSError, which
    names the file, for everything that disk or network refuse.
    """

    keeps_others_out: ClassVar[bool]
    """Whether nobody else writes during a claim that is not shared."""

    def __str__(self) -> str:
        """As a person would name it."""

    def where(self, name: str) -> str:
        """A file's whole address, for messages."""

    def has(self, name: str) -> bool:
        """Whether anything lies there, be it no file."""

    def size(self, name: str) -> int:
        """In bytes."""

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        """The whole of a small file; CacheError, and nothing is read, where it is larger than it can be."""

    def open(self, name: str) -> BufferedReader:
        """To read parts of a file."""

    def local(self, name: str) -> AbstractContextManager[memoryview]:
        """The file's bytes on this machine, paged in as they are touched."""

    def list(self, folder: str = "") -> list[str]:
        """Sorted names of what lies directly in a folder, without the folder's own; those of folders end in a slash.

        Nothing where there is no such folder; NotADirectoryError where a file lies in its place.
        """

    def put_whole(self, name: str, data: bytes) -> None:
        """Write a file, durably: whole, or what was there before stays."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """As `put_whole`, unless there is one already; whether it was written."""

    def draft(self, name: str, attempt: int = 1) -> AbstractContextManager[Draft]:
        """Begin a large file."""

    def clear_drafts(self, name: str) -> int:
        """Delete what dead programs left of drafts of this file; the number of the next attempt, from 1."""

    def delete(self, name: str) -> None:
        """Durably, if it is there."""

    def refuse_others(self, ours: Collection[str], option: str, kind: str) -> None:
        """ConfigError, naming the option, where nothing can be written, or other names than `ours` lie at the top."""

    def claim(self, *, shared: bool = False) -> AbstractContextManager[None]:
        """Be the only one that writes, or one of those that share it; CacheError naming whoever does already."""


@runtime_checkable
class MappedStore(Store, Protocol):
    """Of files that lie on this machine."""

    def map(self, name: str) -> memoryview:
        """The file's bytes for as long as they are held, paged in as they are touched."""


@runtime_checkable
class FetchedStore(Store, Protocol):
    """Of files that are read over a network."""

    def keeping(self, folder: Path, max_bytes: int) -> "FetchedStore":
        """The same, parts of files that are known by their SHA-256 being kept in a folder of this machine."""

    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        """Parts of files, whole, many requests at a time; OSError of ENODATA for one that seems to end before them."""

    def side_by_side(self, call: Callable[[T], R], each: Sequence[T]) -> Sequence[R]:
        """Calls that wait for this store, many at a time; none may itself call for others."""

    def listed(self) -> "FetchedStore":
        """The same to read: `has`, `size` and `list` answer from one listing of everything, made now."""


Address = str | Path | Store
"""A cache as a person names it, or its store."""

STORES: dict[str, Callable[[str], Store]] = {scheme: partial(ObjectStore.in_bucket, scheme) for scheme in SCHEMES}
"""What opens an address `scheme://rest`, by its scheme; an address without one is a folder."""


def listed_once(store: Store) -> Store:
    """To look at many files: of a store that is asked over a network, all names and sizes are fetched together."""
    return store.listed() if isinstance(store, FetchedStore) else store


def wait_together(store: Store, call: Callable[[T], R], each: Sequence[T]) -> Sequence[R]:
    """Calls that read the store, in order; over a network many at a time, none of which may call for others."""
    return store.side_by_side(call, each) if isinstance(store, FetchedStore) else [*map(call, each)]


def is_url(address: Address) -> bool:
    """Whether it is no path of a file or folder of this machine."""
    return "://" in str(address)


def local_path(option: str, given: str | Path) -> Path:
    """Where to write on this machine, `~` replaced; ConfigError, naming the option, for a URL."""
    if URL.match(str(given)):
        raise ConfigError(f"{option}: {given} is a URL; name a path on this machine")
    return Path(given).expanduser()


def open_store(address: Address) -> Store:
    """ConfigError for an address of a kind that is not known."""
    if not isinstance(address, str | Path):
        return address
    scheme, is_url, rest = str(address).partition("://")
    if not is_url:
        if scheme.startswith(tuple(f"{each}:/" for each in SCHEMES)):
            raise ConfigError(f"{address} has one slash too few; a URL is {scheme.partition(':')[0]}://BUCKET/FOLDER")
        return LocalStore(Path(address).expanduser())
    if scheme not in STORES:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        raise ConfigError(f"{address} is a URL of a kind that holds no caches; name a folder, or one of {known}")
    return STORES[scheme](rest)
