"""A model of a POSIX disk, which says what a power cut may leave of it, and a recorder of what a program does to it.

POSIX promises only that `fsync` of a file keeps its bytes, and `fsync` of a folder its names. Until then, a power cut
may leave a file's bytes as they were last synced, none, half of them, zeros for them, or all; and any of the names that
were made, renamed or deleted, whichever came first. Changes of the same name keep their order, and a rename happens
wholly or not.
"""

import io
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import pytest

from cache_store.storage.claim import CLAIM_FILE
from cache_store.storage.publish import scratch_target

Tree = dict[str, bytes | None]
"""Files and their bytes, by path; None for a folder."""

ALL_SUBSETS = 6
"""Up to so many changes that are not on disk, every subset is tried; of more, all, none, each and all but each."""

ROOT = 0

Place = tuple[int, str]
"""A folder's number and a name in it."""


class Change(NamedTuple):
    """Names of one folder that were given to files or folders, or taken from them (None), at the same time."""

    folder: int
    names: dict[str, int | None]


class Disk:
    """Files and folders by number: as programs see them, and as they are on disk for certain."""

    def __init__(self) -> None:
        self.folders: dict[int, dict[str, int]] = {ROOT: {}}
        self.data: dict[int, bytes] = {}
        self.synced_folders: dict[int, dict[str, int]] = {ROOT: {}}
        self.synced_data: dict[int, bytes] = {}
        self.pending: list[Change] = []
        """Changes since the last sync of their folders, in their order."""

    def make(self, folder: int, name: str, *, is_folder: bool = False) -> int:
        """Make an empty file or folder; return its number."""
        number = len(self.folders) + len(self.data)
        if is_folder:
            self.folders[number], self.synced_folders[number] = {}, {}
        else:
            self.data[number], self.synced_data[number] = b"", b""
        self.change(folder, {name: number})
        return number

    def change(self, folder: int, names: dict[str, int | None]) -> None:
        self.pending.append(Change(folder, names))
        apply(self.folders[folder], names)

    def sync(self, number: int) -> None:
        if number in self.data:
            self.synced_data[number] = self.data[number]
        else:
            self.synced_folders[number] = dict(self.folders[number])
            self.pending = [each for each in self.pending if each.folder != number]

    def seen(self) -> Tree:
        """Return what programs see, and also what a program that was killed leaves."""
        return dict(walk(self.folders, self.data))

    def after_a_power_cut(self) -> Iterator[Tree]:
        """Yield what may be there after a power cut."""
        for kept in subsets(self.pending):
            folders = {number: dict(names) for number, names in self.synced_folders.items()}
            for change in kept:
                apply(folders[change.folder], change.names)
            there = {number for _, number in numbers(folders) if number in self.data}
            unsynced = [number for number in there if self.data[number] != self.synced_data[number]]
            for contents in itertools.product(*map(self._contents, unsynced)):
                yield dict(walk(folders, {**self.synced_data, **dict(zip(unsynced, contents, strict=True))}))

    def _contents(self, number: int) -> set[bytes]:
        data = self.data[number]
        return {self.synced_data[number], b"", data[: len(data) // 2], bytes(len(data)), data}


def apply(folder: dict[str, int], names: dict[str, int | None]) -> None:
    for name, number in names.items():
        if number is None:
            folder.pop(name, None)
        else:
            folder[name] = number


def subsets(changes: list[Change]) -> Iterator[list[Change]]:
    """Yield subsets of changes, in their order, the most complete first."""
    sizes = range(len(changes), -1, -1)
    if len(changes) > ALL_SUBSETS:
        sizes = sorted({*sizes[:2], *sizes[-2:]}, reverse=True)
    for size in sizes:
        yield from map(list, itertools.combinations(changes, size))


def numbers(folders: dict[int, dict[str, int]], folder: int = ROOT, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield path and number of everything below a folder."""
    for name, number in folders[folder].items():
        yield f"{path}{name}", number
        if number in folders:
            yield from numbers(folders, number, f"{path}{name}/")


def walk(folders: dict[int, dict[str, int]], data: dict[int, bytes]) -> Iterator[tuple[str, bytes | None]]:
    yield from ((path, data.get(number)) for path, number in numbers(folders))


def without_scratch(tree: Tree) -> Tree:
    """Drop scratch files and claims: no program reads them, so that trees which differ only in them are alike."""
    return {path: data for path, data in tree.items() if not any(map(is_scratch, path.split("/")))}


@cache
def is_scratch(name: str) -> bool:
    return name == CLAIM_FILE or scratch_target(name) is not None


def at_stake(disk: Disk) -> frozenset[tuple[int, str]]:
    """Return the names, except those of scratch files, that a power cut could take away or bring back, by folder."""
    return frozenset((folder, name) for folder, names in disk.pending for name in names if not is_scratch(name))


def lay_out(root: Path, tree: Tree) -> None:
    """Make a folder hold exactly this."""
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    for name, data in sorted(tree.items()):
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)


def tree_of(root: Path) -> Tree:
    paths = sorted(root.rglob("*"))
    return {path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes() for path in paths}


def disk_of(tree: Tree) -> Disk:
    """Return a disk that has all of this for certain."""
    disk, made = Disk(), {"": ROOT}
    for path, data in sorted(tree.items()):
        folder, _, name = path.rpartition("/")
        number = made[path] = disk.make(made[folder], name, is_folder=data is None)
        if data is not None:
            disk.data[number] = data
        disk.sync(number)
        disk.sync(made[folder])
    return disk


class Recorder:
    """Keeps the disk as it was after each step of the program: each change of a name, each write and each sync."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root, self.disk = root, disk
        self.moments = [deepcopy(disk)]
        self._lock = RLock()
        self._numbers = {root.stat().st_ino: ROOT}
        """Numbers of the files and folders that exist, by inode."""
        self._numbers |= {(root / path).stat().st_ino: number for path, number in numbers(disk.folders)}
        self._written: dict[int, int] = {}
        """Descriptors of the files that were opened to be written."""

    def _place(self, path: Any, dir_fd: int | None = None) -> Place | None:
        """Return folder and name of a path; None outside of the root."""
        if dir_fd is not None:
            folder = self._numbers.get(os.fstat(dir_fd).st_ino)
            return None if folder is None else (folder, os.fspath(path))
        if isinstance(path, int) or not (path := Path(path).absolute()).is_relative_to(self.root):
            return None
        with self._lock:  # another thread may just be making the folder
            return self._numbers[path.parent.stat().st_ino], path.name

    def _look(self) -> None:
        """Note what was written since."""
        for number, descriptor in self._written.items():
            data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            if data != self.disk.data[number]:
                self.disk.data[number] = data
                self.moments.append(deepcopy(self.disk))

    def _do(self, call: Callable[[], Any], note: Callable[..., object], *places: Place | None) -> Any:
        """Make a call, and if it is about this disk, note what it did, while no other thread makes one."""
        if None in places:
            return call()
        with self._lock:
            self._look()
            result = call()
            note(*places)
            self.moments.append(deepcopy(self.disk))
            return result

    # Each method makes the call `real` and notes what it did.

    def open(self, real: Callable[..., Any], path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        def note(place: Place) -> None:
            folder, name = place
            if name not in self.disk.folders[folder]:
                self._numbers[Path(path).stat().st_ino] = self.disk.make(*place)
            number = self.disk.folders[folder][name]
            if number not in self._written:
                self._written[number] = os.open(path, os.O_RDONLY)

        writes = {*mode} & {*"wax+"}
        return self._do(partial(real, path, mode, *rest, **options), note, self._place(path) if writes else None)

    def fsync(self, real: Callable[..., Any], descriptor: int) -> Any:
        """Sync only the model."""
        number = self._numbers.get(os.fstat(descriptor).st_ino)
        return real(descriptor) if number is None else self._do(lambda: None, lambda: self.disk.sync(number))

    def mkdir(self, real: Callable[..., Any], path: Any, *rest: Any, **options: Any) -> Any:
        def note(place: Place) -> None:
            self._numbers[Path(path).stat().st_ino] = self.disk.make(*place, is_folder=True)

        return self._do(partial(real, path, *rest, **options), note, self._place(path))

    def unlink(self, real: Callable[..., Any], path: Any, *, dir_fd: int | None = None) -> Any:
        def note(place: Place) -> None:
            self.disk.change(place[0], {place[1]: None})

        return self._do(partial(real, path, dir_fd=dir_fd), note, self._place(path, dir_fd))

    def rename(self, real: Callable[..., Any], path: Any, target: Any) -> Any:
        def note(place: Place, to: Place) -> None:
            (folder, name), (other, new) = place, to
            assert folder == other, "the model knows no renames into another folder"
            self.disk.change(folder, {name: None, new: self.disk.folders[folder][name]})

        return self._do(partial(real, path, target), note, self._place(path), self._place(target))

    def link(self, real: Callable[..., Any], path: Any, target: Any) -> Any:
        def note(place: Place, to: Place) -> None:
            self.disk.change(to[0], {to[1]: self.disk.folders[place[0]][place[1]]})

        return self._do(partial(real, path, target), note, self._place(path), self._place(target))

    def close(self) -> None:
        self._look()
        for descriptor in self._written.values():
            os.close(descriptor)


CALLS = {"open": (io, "open"), "fsync": (os, "fsync"), "mkdir": (os, "mkdir"), "link": (os, "link")}
CALLS |= {name: (os, name) for name in ("unlink", "remove", "rmdir", "rename", "replace")}
SAME = {"remove": "unlink", "rmdir": "unlink", "replace": "rename"}
"""System calls that change a disk, and the recorder's method for each; pathlib and shutil use these too."""


@contextmanager
def recorded(root: Path, disk: Disk) -> Iterator[list[Disk]]:
    """Record a program that writes below `root`, where `disk` is seen; yield the disk after each of its steps.

    In the end, the model must see what is really there: so no change went past it.
    """
    recorder = Recorder(root, deepcopy(disk))
    assert disk.seen() == tree_of(root)
    with pytest.MonkeyPatch.context() as patch:
        for name, (module, function) in CALLS.items():
            method, real = getattr(recorder, SAME.get(name, name)), getattr(module, function)
            patch.setattr(module, function, partial(method, real))
        yield recorder.moments
    recorder.close()
    assert recorder.disk.seen() == tree_of(root)
