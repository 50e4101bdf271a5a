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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar

from cache_store.errors import ConfigError
from cache_store.storage.files import MAX_READ_BYTES, SCRATCH_SUFFIX, naming_scratch, too_large
from cache_store.storage.kept_blocks import KeptBlocks, Ranges
from cache_store.storage.listing import UrlFolder, entries_by_folder
from cache_store.storage.local import WRITE_BYTES, map_file
from cache_store.storage.objects.callers import GRACE_S, UPLOAD_GRACE_S
from cache_store.storage.objects.client import ATTEMPTS, all_objects, ask, client, pool
from cache_store.storage.objects.errors import CutShortError, missing
from cache_store.storage.objects.forked import also_forked
from cache_store.storage.range_reader import RangeReader, Span, read_parts

MULTIPART_BYTES, PART_BYTES = 64 << 20, 16 << 20
"""Files from this size on are uploaded in parts, where a file of the name may be replaced."""

MOST_CREATED_BYTES = 5_000 << 20
"""Azure takes no more in one request, S3 little more, and only one request can be conditional."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ObjectStore(UrlFolder):
    """A `Store` below a URL; it connects at its first use, in each process anew."""

    kept: KeptBlocks | None = None
    """Where parts of files are kept on this machine."""
    keeps_others_out: ClassVar[bool] = False

    def has(self, name: str) -> bool:
        try:
            self.size(name)
        except FileNotFoundError:
            return bool(self.list(name))
        return True

    @also_forked
    def size(self, name: str) -> int:
        return ask(self.where(name), lambda: int(client(self.url).head(name)["size"]))

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        found = self.read_up_to(name, at_most)
        if isinstance(found, int):
            raise too_large(self.where(name), found, at_most)
        return found

    @also_forked
    def read_up_to(self, name: str, at_most: int) -> bytes | int:
        """The whole of a file, or its size where that is more."""

        def whole() -> bytes | int:
            answer = client(self.url).get(name)
            if answer.meta["size"] > at_most:
                return int(answer.meta["size"])
            data = bytes(answer.bytes())
            if len(data) != answer.meta["size"]:
                raise CutShortError
            return data

        return ask(self.where(name), whole)

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
        return [[memoryview(part) for part in each] for each in self.fetch_now(wanted)]

    @also_forked
    def fetch_now(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        return self.side_by_side(self._fetch, wanted)

    def side_by_side(self, call: Callable[[T], R], each: Sequence[T]) -> Sequence[R]:
        return [*(pool().map if len(each) > 1 else map)(call, each)]

    def _fetch(self, wanted: Ranges) -> list[memoryview]:
        """Neighbours as one; not by obstore, which dies of an answer that ends before one of them begins."""
        name, starts, lengths, *_ = wanted

        def fetch(spans: Sequence[Span]) -> Sequence[Any]:
            begin, sizes = [first for first, _ in spans], [end - first for first, end in spans]
            found = client(self.url).get_ranges(name, starts=begin, lengths=sizes, coalesce=0)
            if [*map(len, found)] != sizes:
                raise CutShortError
            return found

        parts = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        return ask(self.where(name), lambda: read_parts(parts, fetch))

    @contextmanager
    def local(self, name: str) -> Iterator[memoryview]:
        """By way of a scratch file."""
        with self.open(name) as stream, scratch() as path:
            with naming_scratch(), path.open("wb") as copy:
                shutil.copyfileobj(stream, copy, PART_BYTES)
            yield map_file(path)

    @also_forked
    def list(self, folder: str = "") -> list[str]:
        found = ask(f"{self.where(folder)}/", lambda: client(self.url).list_with_delimiter(folder or None))
        names = [each["path"] for each in found["objects"]]
        folders = [f"{path}/" for path in found["common_prefixes"]]
        prefix = f"{folder}/" if folder else ""
        return sorted(name.removeprefix(prefix) for name in (*names, *folders) if name not in ("", folder))

    def listed(self) -> "ListedObjects":
        sizes = {each["path"]: int(each["size"]) for each in all_objects(self.url)}
        return ListedObjects(self.url, self.kept, sizes, entries_by_folder(sizes))

    def put_whole(self, name: str, data: bytes) -> None:
        ask(self.where(name), lambda: client(self.url, len(data)).put(name, data, use_multipart=False))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._create(name, data) or self.read_up_to(name, len(data)) == data  # which may be this very put's

    def _create(self, name: str, data: bytes | memoryview, grace_s: float = GRACE_S) -> bool:
        """Whether the file was not there and now is; it may also have been this call's, repeated, that was first."""
        if len(data) > MOST_CREATED_BYTES:
            limit = f"{len(data):,} bytes are more than an object store takes at once; lower samples_per_shard"
            raise OSError(errno.EFBIG, limit, self.where(name))

        def is_first() -> bool:
            from obstore.exceptions import AlreadyExistsError

            with suppress(AlreadyExistsError):  # or S3's 409: another put of this name is under way
                client(self.url, len(data)).put(name, data, mode="create")
                return True
            return False

        for attempt in range(ATTEMPTS):
            if ask(self.where(name), is_first, grace_s):
                return True
            if self.has(name):
                return False
            time.sleep(2**attempt / 10)
        raise OSError(errno.EAGAIN, "others are writing it, and it does not appear", self.where(name))

    @contextmanager
    def draft(self, name: str, attempt: int = 1) -> Iterator["ObjectDraft"]:
        with scratch() as path, naming_scratch(), path.open("wb", buffering=WRITE_BYTES) as stream:
            yield ObjectDraft(self, name, path, stream)

    def clear_drafts(self, name: str) -> int:
        return 1

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):  # S3 says nothing of it, GCS and Azure do
            ask(self.where(name), lambda: client(self.url).delete(name))

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

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        with naming_scratch():
            yield self.stream

    def finish(self) -> None:
        with self.writing() as stream:
            stream.flush()

    def map(self) -> memoryview:
        return map_file(self.scratch)

    def publish(self) -> None:
        size = self.scratch.stat().st_size
        in_parts = size >= MULTIPART_BYTES

        def put() -> None:
            to = client(self.store.url, PART_BYTES if in_parts else size)
            to.put(self.name, self.scratch, use_multipart=in_parts, chunk_size=PART_BYTES)

        ask(self.store.where(self.name), put, UPLOAD_GRACE_S)

    def publish_if_absent(self) -> bool:
        return self.store._create(self.name, self.map(), UPLOAD_GRACE_S)


@contextmanager
def scratch() -> Iterator[Path]:
    """A file of this process alone, without a name where the system can do so: it goes however the process ends."""
    with naming_scratch():
        descriptor, named = tempfile.mkstemp(SCRATCH_SUFFIX, "encode-once-")
    nameless = Path(f"/proc/self/fd/{descriptor}")
    try:
        if nameless.exists():
            Path(named).unlink()
            yield nameless
        else:
            yield Path(named)
    finally:
        os.close(descriptor)
        Path(named).unlink(missing_ok=True)
