"""Where a cache may lie, seen and changed past the product: what tests need of a folder and of a bucket alike."""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self


class Place(ABC):
    """Files by their names in the cache."""

    @property
    @abstractmethod
    def address(self) -> str:
        """As command lines name it."""

    @abstractmethod
    def at(self, name: str) -> Self:
        """A place within this one."""

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def put(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def lose(self, *names: str) -> None: ...

    @abstractmethod
    def files(self) -> dict[str, bytes]: ...

    @abstractmethod
    def marks(self) -> dict[str, object]:
        """Of every file, what another has that is written later, though of the same bytes."""

    def timeless(self) -> dict[str, bytes]:
        """Every file without what has a clock in it: commit records, the claim, and when the source was written."""
        files = {name: data for name, data in self.files().items() if name.split("/")[0] not in ("commits", ".claim")}
        with suppress(KeyError, ValueError):
            build = json.loads(files["build.json"])
            listed = build.get("listed") and build["listed"] | {"source": ""}
            files["build.json"] = json.dumps([build["config"], listed]).encode()
        return files

    def flip(self, name: str) -> None:
        """One bit in the middle of a file."""
        data = bytearray(self.read(name))
        data[len(data) // 2] ^= 1
        self.put(name, bytes(data))

    def mirror(self, other: "Place") -> None:
        """Make what lies here what lies there."""
        wanted, here = other.files(), self.files()
        self.lose(*(here.keys() - wanted.keys()))
        for name, data in wanted.items():
            if here.get(name) != data:
                self.put(name, data)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Nothing is written, renamed or deleted meanwhile."""
        before = self.marks()
        yield
        assert self.marks() == before


@dataclass(frozen=True)
class Folder(Place):
    path: Path

    @property
    def address(self) -> str:
        return str(self.path)

    def at(self, name: str) -> Self:
        return type(self)(self.path / name)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_bytes(data)

    def lose(self, *names: str) -> None:
        for name in names:
            (self.path / name).unlink()

    def files(self) -> dict[str, bytes]:
        paths = sorted(path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): path.read_bytes() for path in paths}

    def mirror(self, other: Place) -> None:
        """Also of folders none is left over."""
        shutil.rmtree(self.path, ignore_errors=True)
        super().mirror(other)

    def marks(self) -> dict[str, object]:
        """Inode and modification time."""
        files = (path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}
