"""Stores that fail, kill their program, count calls or do not read: `faulty://`, `deadly://`, `counting://`, `unread://`."""

import errno
import io
import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from cache_store.storage.local import WRITE_BYTES, LocalFile, LocalStore
from cache_store.storage.protocol import MAX_READ_BYTES, Version


class FaultyDisk:
    """Counts a store's writes, syncs and renames, and makes a chosen one fail."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self._chosen: tuple[str, int] | None = None
        self._full = False

    def choose(self, kind: str, number: int) -> None:
        self.count.clear()
        self._chosen, self._full = (kind, number), False

    def mend(self) -> None:
        self._chosen, self._full = None, False

    def write(self, write: Any, data: Any) -> int:
        """Write; a full disk takes half of the chosen write, then nothing more."""
        self.count["write"] += 1
        if self._full or self._chosen == ("write", self.count["write"]):
            if not self._full and len(data) > 1:
                self._full = True
                return int(write(memoryview(data)[: len(data) // 2]))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(write(data))

    def step(self, kind: str, *names: str | None) -> None:
        self.count[kind] += 1
        if self._chosen == (kind, self.count[kind]):
            raise OSError(errno.EIO, os.strerror(errno.EIO), *names)


class FaultyFile(io.FileIO):
    def __init__(self, path: Path, disk: FaultyDisk) -> None:
        super().__init__(path, "w")
        self._disk = disk

    def write(self, data: Any) -> int:
        return self._disk.write(super().write, data)


@dataclass(frozen=True)
class FaultyStore(LocalStore):
    disk: FaultyDisk

    def __str__(self) -> str:
        return f"faulty://{self.root}"

    def create(self, path: Path) -> BinaryIO:
        return io.BufferedWriter(FaultyFile(path, self.disk), WRITE_BYTES)

    def sync(self, descriptor: int) -> None:
        self.disk.step("sync")
        super().sync(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        self.disk.step("rename", str(path), None, str(target))
        super().rename(path, target)

    def link(self, path: Path, target: Path) -> None:
        self.disk.step("rename", str(path), None, str(target))
        super().link(path, target)


@dataclass(frozen=True)
class DeadlyStore(LocalStore):
    """Kills its program at its n-th sync: of a file before it gets its name, or of a folder after a name changed."""

    dies_at: int
    syncs: "count[int]" = field(default_factory=lambda: count(1))

    def __str__(self) -> str:
        return f"deadly://{self.root}"

    def sync(self, descriptor: int) -> None:
        if next(self.syncs) == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        super().sync(descriptor)


@dataclass(frozen=True)
class CountingStore(LocalStore):
    """Counts how often each file is read, opened or mapped."""

    opened: Counter[str]

    def __str__(self) -> str:
        return f"counting://{self.root}"

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        self.opened[name] += 1
        return super().read(name, at_most)

    def open(self, name: str, version: Version | None = None) -> LocalFile:
        self.opened[name] += 1
        return super().open(name, version)

    def map(self, name: str) -> memoryview:
        self.opened[name] += 1
        return super().map(name)


@dataclass(frozen=True)
class UnreadStore(LocalStore):
    """Does not read one of its files, whose name and size it tells: `unread://PATH`."""

    unread: str
    error: int

    def __str__(self) -> str:
        return f"unread://{self.root}"

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        self._fail(name)
        return super().read(name, at_most)

    def open(self, name: str, version: Version | None = None) -> LocalFile:
        self._fail(name)
        return super().open(name, version)

    def map(self, name: str) -> memoryview:
        self._fail(name)
        return super().map(name)

    def _fail(self, name: str) -> None:
        if name == self.unread:
            raise OSError(self.error, os.strerror(self.error), self.where(name))
