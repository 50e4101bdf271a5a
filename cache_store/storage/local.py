"""A cache in a folder of this machine: whole or absent, mapped into memory to be read."""

import errno
import mmap
import os
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, ClassVar

from cache_store.storage.claim import claim, refuse_foreign_names
from cache_store.storage.files import (
    MAX_READ_BYTES,
    clear_scratch,
    make_folder,
    naming,
    refuse_irregular,
    scratch_path,
    sync_folder,
    too_large,
    unused_attempt,
)

WRITE_BYTES = 4 * 2**20
"""Written at a time: the page cache then holds a file just written in large folios, and reading samples at random
from it was measured 16 % faster than after writes of 25 KB (ext4, Linux 6.18); read back from disk, both are alike.
"""

NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""What file systems say that know no hard links."""


@dataclass(frozen=True)
class LocalStore:
    """A `Store` in a folder; `create`, `sync`, `rename` and `link` are all that its writing asks of the disk."""

    root: Path
    keeps_others_out: ClassVar[bool] = True

    def create(self, path: Path) -> BinaryIO:
        return path.open("wb", buffering=WRITE_BYTES)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        path.replace(target)

    def link(self, path: Path, target: Path) -> None:
        os.link(path, target)

    def __str__(self) -> str:
        return str(self.root)

    def where(self, name: str) -> str:
        return str(self.root / name)

    def has(self, name: str) -> bool:
        return os.path.lexists(self.root / name)

    def size(self, name: str) -> int:
        return refuse_irregular(self.root / name).st_size

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        size = refuse_irregular(path := self.root / name).st_size
        if size > at_most:
            raise too_large(path, size, at_most)
        with naming(path):
            return path.read_bytes()

    def open(self, name: str) -> BufferedReader:
        refuse_irregular(path := self.root / name)
        return path.open("rb")

    def map(self, name: str) -> memoryview:
        return map_file(self.root / name)

    @contextmanager
    def local(self, name: str) -> Iterator[memoryview]:
        yield self.map(name)

    def list(self, folder: str = "") -> list[str]:
        try:
            with os.scandir(self.root / folder) as entries:
                return sorted(entry.name + "/" * entry.is_dir(follow_symlinks=False) for entry in entries)
        except FileNotFoundError:
            return []

    def put_whole(self, name: str, data: bytes) -> None:
        with self.draft(name) as draft:
            draft.stream.write(data)
            draft.finish()
            draft.publish()

    def put_if_absent(self, name: str, data: bytes) -> bool:
        with self.draft(name, unused_attempt()) as draft:
            draft.stream.write(data)
            draft.finish()
            return draft.publish_if_absent()

    @contextmanager
    def draft(self, name: str, attempt: int = 1) -> Iterator["LocalDraft"]:
        path = self.root / name
        make_folder(path.parent, self.sync)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a folder lies where a file belongs, move it away", str(path))
        scratch = scratch_path(path, attempt)
        try:
            with naming(path), self.create(scratch) as stream:
                yield LocalDraft(self, path, scratch, stream)
        finally:
            with suppress(OSError):  # it was put in place, or its disk has gone, which has been said
                scratch.unlink()

    def clear_drafts(self, name: str) -> int:
        return clear_scratch(self.root / name)

    def delete(self, name: str) -> None:
        if self.has(name):
            (self.root / name).unlink()
            sync_folder((self.root / name).parent, self.sync)

    def refuse_others(self, ours: Collection[str], option: str, kind: str) -> None:
        refuse_foreign_names(self.root, ours, option, kind)

    def claim(self, *, shared: bool = False) -> AbstractContextManager[None]:
        return claim(self.root, shared=shared)


@dataclass(frozen=True)
class LocalDraft:
    """A scratch file beside its place; OSErrors of its stream name the file that it is to become."""

    store: LocalStore
    path: Path
    scratch: Path
    stream: BinaryIO

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        with naming(self.path):
            yield self.stream

    def finish(self) -> None:
        with self.writing() as stream:
            stream.flush()
            self.store.sync(stream.fileno())

    def map(self) -> memoryview:
        return map_file(self.scratch)

    def publish(self) -> None:
        self.store.rename(self.scratch, self.path)
        sync_folder(self.path.parent, self.store.sync)

    def publish_if_absent(self) -> bool:
        try:
            self.store.link(self.scratch, self.path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if os.path.lexists(self.path):
                return False
            self.store.rename(self.scratch, self.path)
        sync_folder(self.path.parent, self.store.sync)
        return True


def map_file(path: Path) -> memoryview:
    """The file's bytes, read-only, paged in as they are touched."""
    if not refuse_irregular(path).st_size:
        return memoryview(b"")  # which mmap refuses
    with path.open("rb") as stream:
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def write_file(path: Path, data: bytes) -> None:
    """Write a file that is no cache's as those are written."""
    LocalStore(path.parent).put_whole(path.name, data)
