"""Store files in a local folder: written whole or not at all, and mapped into memory to read."""

import errno
import filecmp
import io
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Self

from cache_store.errors import ConfigError
from cache_store.storage.claim import CLAIM_FILE, claim_folder
from cache_store.storage.files import map_file, refuse_irregular
from cache_store.storage.protocol import (
    MAX_READ_BYTES,
    Data,
    Draft,
    File,
    Ranges,
    Store,
    Version,
    changed_error,
    cut_short_error,
    too_large_error,
)
from cache_store.storage.publish import (
    SCRATCH_SUFFIX,
    clear_scratch,
    flush,
    name_in_errors,
    scratch_beside,
    sync_path,
    unused_attempt,
)

WRITE_BYTES = 4 * 2**20
"""Bytes per write: the page cache then holds a new file in large folios, and random reads of samples from it were 16 %
faster than after writes of 25 KB (ext4, Linux 6.18). There is no difference once the file is read from disk.
"""

NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""Errors of file systems without hard links."""


@dataclass(frozen=True)
class LocalStore(Store):
    """A `Store` in a folder; it writes only through `create`, `sync`, `rename` and `link`, which tests replace."""

    root: Path

    is_remote = False
    has_exclusive_claims = True

    def create(self, path: Path) -> BinaryIO:
        return path.open("wb", buffering=WRITE_BYTES)

    def sync(self, descriptor: int) -> None:
        flush(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        path.replace(target)

    def link(self, path: Path, target: Path) -> None:
        os.link(path, target)

    def __str__(self) -> str:
        return str(self.root)

    def where(self, name: str) -> str:
        return f"{self._prefix}{name}" if name else str(self.root)

    @cached_property
    def _prefix(self) -> str:
        # Cached: making a Path takes longer than reading a status.
        return str(self.root / "x")[:-1]

    def has(self, name: str) -> bool:
        return os.path.lexists(self.root / name)

    def stat(self, name: str) -> Version:
        return version_of_status(refuse_irregular(self.where(name)))

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        if (size := refuse_irregular(path := self.where(name)).st_size) > at_most:
            raise too_large_error(path, size, at_most)
        with NamedFile(path) as file, name_in_errors(path):
            return file.readall()

    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        return [self._ranges(each) for each in wanted]

    def _ranges(self, wanted: Ranges) -> list[memoryview]:
        spans = zip(wanted.starts, wanted.lengths, strict=True)
        with self.open(wanted.name, wanted.version) as file:
            parts = [memoryview(file.part(start, length)) for start, length in spans]
        if [*map(len, parts)] != [*wanted.lengths]:
            raise cut_short_error(self.where(wanted.name))
        return parts

    def open(self, name: str, version: Version | None = None) -> "LocalFile":
        return LocalFile(self.root / name, version)

    def map(self, name: str) -> memoryview:
        return map_file(self.root / name)

    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        """Yield names, sorted in each folder, without versions, which would take a call per file."""

        def refuse(error: OSError) -> None:
            raise error

        for folder, subfolders, files in os.walk(self.root, onerror=refuse):
            top = f"{Path(folder).relative_to(self.root).as_posix()}/".removeprefix("./")
            subfolders.sort()
            yield from ((f"{top}{each}/", None) for each in subfolders if Path(folder, each).is_symlink())
            yield from ((f"{top}{each}", None) for each in sorted(files))

    def list(self, folder: str = "") -> list[str]:
        try:
            with os.scandir(self.root / folder) as entries:
                return sorted(entry.name + "/" * entry.is_dir(follow_symlinks=False) for entry in entries)
        except FileNotFoundError:
            return []

    def put_whole(self, name: str, data: Data) -> None:
        with self.draft(name) as draft:
            draft.stream.write(data)
            draft.finish()
            draft.publish()

    def put_if_absent(self, name: str, data: Data) -> bool:
        with self.draft(name, unused_attempt()) as draft:
            draft.stream.write(data)
            draft.finish()
            return draft.publish_if_absent()

    @contextmanager
    def draft(self, name: str, attempt: int = 1) -> Iterator[Draft]:
        path = self.root / name
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a folder is in the place of a file, move it away", str(path))
        with scratch_beside(path, attempt, self.sync) as scratch, self.create(scratch) as stream:
            yield Draft(self, name, scratch, stream)

    def put_file(self, name: str, scratch: Path) -> None:
        self.rename(scratch, self.root / name)
        self.make_durable(name)

    def put_file_if_absent(self, name: str, scratch: Path) -> bool:
        path = self.root / name
        try:
            self.link(scratch, path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, *NO_LINKS):
                raise
            if not os.path.lexists(path):
                self.rename(scratch, path)
            elif not filecmp.cmp(scratch, path, shallow=False):
                return False
        self.make_durable(name)  # also if another program gave the name, and has not come to sync it
        return True

    def make_durable(self, name: str) -> None:
        # All folders up to the store's: another program may have made these too.
        for folder in Path(name).parents:
            sync_path(self.root / folder, self.sync)

    def clear_drafts(self, name: str) -> int:
        return clear_scratch(self.root / name)

    def delete(self, name: str) -> None:
        if name.endswith("/"):
            with suppress(OSError):
                (self.root / name).rmdir()
        elif (folder := (self.root / name).parent).is_dir():
            (self.root / name).unlink(missing_ok=True)
            sync_path(folder, self.sync)  # also if a program that died deleted it, and has not come to sync that

    def refuse_foreign_names(self, ours: Collection[str], option: str, kind: str) -> None:
        nearest = next(path for path in (self.root, *self.root.parents) if os.path.lexists(path))
        if not nearest.is_dir():
            raise ConfigError(f"{option}: {nearest} is not a folder")
        scratch = {name for name in self.list() if name.endswith(SCRATCH_SUFFIX)}
        super().refuse_foreign_names({CLAIM_FILE, *scratch, *ours}, option, kind)

    def claim(self, *, shared: bool = False) -> AbstractContextManager[None]:
        return claim_folder(self.root, shared=shared)

    def free_bytes(self) -> int | None:
        root = self.root.absolute()
        place = next(each for each in (root, *root.parents) if each.exists())
        return shutil.disk_usage(place).free or None  # some network file systems tell 0

    def contains(self, other: Store) -> bool:
        return "://" not in str(other) and Path(str(other)).resolve().is_relative_to(self.root.resolve())

    def absolute(self) -> Self:
        return replace(self, root=self.root.absolute())


class LocalFile(File):
    """An open file of this machine; it keeps its bytes when another file takes its name."""

    def __init__(self, path: Path, version: Version | None = None) -> None:
        found = version_of_status(refuse_irregular(path))
        if version is not None and version != found:
            raise changed_error(path)
        self._path = path
        super().__init__(NamedFile(path), str(path), found)

    def reopen(self) -> Self:
        return type(self)(self._path, self.version)

    def part(self, start: int, length: int) -> bytes:
        with name_in_errors(self._path):
            data = os.pread(self.fileno(), length, start)
        if version_of_status(os.fstat(self.fileno())) != self.version:
            raise changed_error(self._path)
        return data

    def refuse_changed(self) -> None:
        if version_of_status(self._path.stat()) != self.version:
            raise changed_error(self._path)


class NamedFile(io.FileIO):
    # Python's own errors say only what failed.

    def readinto(self, buffer: Any) -> int | None:
        with name_in_errors(str(self.name)):
            return super().readinto(buffer)


def version_of_status(status: os.stat_result) -> Version:
    return Version(status.st_size, str(status.st_mtime_ns), str(status.st_ctime_ns))


def write_file(path: Path, data: Data) -> None:
    """Write a file that belongs to no cache, durably, whole or not at all."""
    LocalStore(path.parent).put_whole(path.name, data)
