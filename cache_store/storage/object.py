"""A cache in an object store (S3, GCS, Azure), by obstore: files are put whole, and read by ranges.

A draft is a file in local scratch (TMPDIR) until it is published. There are no locks: `claim` keeps nobody out, and the
first that gives a file its name wins (`put_if_absent`), which the store decides.
"""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, ClassVar, Self, TypeVar

from cache_store.errors import ConfigError
from cache_store.storage.files import SCRATCH_SUFFIX, naming
from cache_store.storage.forked import ask_helper, is_forked
from cache_store.storage.kept_blocks import KeptBlocks, Ranges
from cache_store.storage.listing import entries_by_folder
from cache_store.storage.local import WRITE_BYTES, map_file
from cache_store.storage.object_client import (
    ATTEMPTS,
    client,
    cut_short,
    missing,
    pool,
    telling,
    was_answered_or_retried,
)
from cache_store.storage.range_reader import RangeReader

MULTIPART_BYTES, PART_BYTES = 64 << 20, 16 << 20
"""Files from this size on are uploaded in parts, where a file of the name may be replaced."""

MOST_CREATED_BYTES = 5 * 2**30
"""S3 takes no more in one request, and only one request can be conditional."""

COALESCED_BYTES = 256 << 10
"""Ranges that are no further apart are fetched as one."""


T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ObjectStore:
    """A `Store` at a URL, without a slash at its end; it connects at its first use, in each process anew."""

    url: str
    kept: KeptBlocks | None = None
    """Where parts of files are kept on this machine."""
    keeps_others_out: ClassVar[bool] = False

    @classmethod
    def at(cls, scheme: str, place: str) -> Self:
        """ConfigError where the URL names no bucket."""
        if not place.strip("/") or place.startswith("/"):
            raise ConfigError(f"{scheme}://{place} names no bucket; a cache's URL is {scheme}://BUCKET/FOLDER")
        return cls(f"{scheme}://{place.rstrip('/')}")

    def __str__(self) -> str:
        return self.url

    def where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def has(self, name: str) -> bool:
        try:
            self.size(name)
        except FileNotFoundError:
            return bool(self.list(name))
        return True

    def size(self, name: str) -> int:
        if is_forked():
            return int(ask_helper(self.url, "size", name))
        with telling(self.where(name)):
            return int(client(self.url).head(name)["size"])

    def read(self, name: str) -> bytes:
        if is_forked():
            return bytes(ask_helper(self.url, "read", name))
        for attempt in range(ATTEMPTS):
            with telling(self.where(name)):
                from obstore.exceptions import GenericError

                try:
                    answer = client(self.url).get(name)
                    data, size = bytes(answer.bytes()), int(answer.meta["size"])
                except GenericError as error:  # obstore asks no more once an answer has begun
                    if was_answered_or_retried(error) or attempt == ATTEMPTS - 1:
                        raise
                    continue
            if len(data) == size:
                return data
        raise cut_short(self.where(name))

    def open(self, name: str) -> BufferedReader:
        def fetch(start: int, length: int) -> memoryview:
            return self.fetch([Ranges(name, [start], [length])])[0][0]

        return BufferedReader(RangeReader(self.size(name), fetch))

    def keeping(self, folder: Path, max_bytes: int) -> "ObjectStore":
        return replace(self, kept=KeptBlocks(folder, max_bytes))

    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        """Parts of several files, of which many are fetched at the same time."""
        if self.kept and all(each.sha256 for each in wanted):
            return self.kept.fetch(wanted, replace(self, kept=None).fetch)
        if is_forked():
            return [[memoryview(part) for part in each] for each in ask_helper(self.url, "fetch", wanted)]
        return self.side_by_side(self._fetch, wanted)

    def side_by_side(self, call: Callable[[T], R], each: Sequence[T]) -> Sequence[R]:
        return [*(pool().map(call, each) if len(each) > 1 and not is_forked() else map(call, each))]

    def _fetch(self, wanted: Ranges) -> list[memoryview]:
        """An answer that was cut short is asked for again."""
        name, starts, lengths, *_ = wanted
        for _ in range(ATTEMPTS):
            with telling(self.where(name)):
                parts = client(self.url).get_ranges(name, starts=starts, lengths=lengths, coalesce=COALESCED_BYTES)
            views = [memoryview(part) for part in parts]
            if [*map(len, views)] == [*lengths]:
                return views
        raise cut_short(self.where(name))

    @contextmanager
    def local(self, name: str) -> Iterator[memoryview]:
        """By way of a scratch file."""
        with self.open(name) as stream, scratch() as path:
            with naming(path), path.open("wb") as copy:
                shutil.copyfileobj(stream, copy, PART_BYTES)
            yield map_file(path)

    def list(self, folder: str = "") -> list[str]:
        if is_forked():
            return [*ask_helper(self.url, "list", folder)]
        with telling(self.where(folder)):
            found = client(self.url).list_with_delimiter(folder or None)
        names = [each["path"] for each in found["objects"]]
        folders = [f"{path}/" for path in found["common_prefixes"]]
        prefix = f"{folder}/" if folder else ""
        return sorted(name.removeprefix(prefix) for name in (*names, *folders) if name not in ("", folder))

    def listed(self) -> "ListedObjects":
        with telling(self.url):
            sizes = {each["path"]: int(each["size"]) for page in client(self.url).list() for each in page}
        return ListedObjects(self.url, self.kept, sizes, entries_by_folder(sizes))

    def put_whole(self, name: str, data: bytes) -> None:
        with telling(self.where(name)):
            client(self.url, len(data)).put(name, data, use_multipart=False)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._create(name, data) or self.read(name) == data  # a retried put may meet its own first success

    def _create(self, name: str, data: bytes | memoryview) -> bool:
        """Whether the file was not there and now is; it may also have been this call's, retried, that was first."""
        from obstore.exceptions import AlreadyExistsError, GenericError

        if len(data) > MOST_CREATED_BYTES:
            limit = f"{len(data):,} bytes are more than an object store takes at once; lower samples_per_shard"
            raise OSError(errno.EFBIG, limit, self.where(name))
        for attempt in range(ATTEMPTS):
            with telling(self.where(name)):
                try:
                    client(self.url, len(data)).put(name, data, mode="create")
                    return True
                except AlreadyExistsError:  # or S3's 409: another put of this name is under way
                    pass
                except GenericError as error:  # obstore tries no create again whose answer it did not get
                    if was_answered_or_retried(error) or attempt == ATTEMPTS - 1:
                        raise
            if self.has(name):
                return False
            time.sleep(2**attempt / 10)
        raise OSError(errno.EAGAIN, "others are writing it, and it does not appear", self.where(name))

    @contextmanager
    def draft(self, name: str, attempt: int = 1) -> Iterator["ObjectDraft"]:
        with scratch() as path, naming(path), path.open("wb", buffering=WRITE_BYTES) as stream:
            yield ObjectDraft(self, name, path, stream)

    def clear_drafts(self, name: str) -> int:
        return 1

    def delete(self, name: str) -> None:
        with telling(self.where(name)):
            client(self.url).delete(name)

    def refuse_others(self, ours: Collection[str], option: str, kind: str) -> None:
        if foreign := sorted({name.rstrip("/") for name in self.list()} - set(ours)):
            raise ConfigError(f"{option}: {self} holds {foreign[0]!r} but no {kind}; name an empty or a new folder")

    def claim(self, *, shared: bool = False) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class ListedObjects(ObjectStore):
    """The store as one listing found it: what is written from then on is read, but neither listed nor measured."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    entries: Mapping[str, Collection[str]] = field(default_factory=dict)
    """What lies directly in each folder, as `list` gives it."""

    def has(self, name: str) -> bool:
        return name in self.sizes or name in self.entries

    def size(self, name: str) -> int:
        if name not in self.sizes:
            raise missing(self.where(name))
        return self.sizes[name]

    def list(self, folder: str = "") -> list[str]:
        return sorted(self.entries.get(folder, ()))

    def listed(self) -> "ListedObjects":
        return self


@dataclass(frozen=True)
class ObjectDraft:
    """A scratch file of this machine, uploaded when it is published."""

    store: ObjectStore
    name: str
    scratch: Path
    stream: BinaryIO

    def finish(self) -> None:
        with naming(self.scratch):
            self.stream.flush()

    def map(self) -> memoryview:
        return map_file(self.scratch)

    def publish(self) -> None:
        size = self.scratch.stat().st_size
        in_parts = size >= MULTIPART_BYTES
        with telling(self.store.where(self.name)):
            client(self.store.url, PART_BYTES if in_parts else size).put(
                self.name, self.scratch, use_multipart=in_parts, chunk_size=PART_BYTES
            )

    def publish_if_absent(self) -> bool:
        return self.store._create(self.name, self.map())


@contextmanager
def scratch() -> Iterator[Path]:
    """A file of this process alone, deleted in the end."""
    with naming(tempfile.gettempdir()):
        descriptor, path = tempfile.mkstemp(SCRATCH_SUFFIX, "encode-once-")
    os.close(descriptor)
    try:
        yield Path(path)
    finally:
        Path(path).unlink(missing_ok=True)
