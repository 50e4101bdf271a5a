"""Places of caches, a folder or a bucket, that tests read and change without this project's code."""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tests.object_stores.server import ACCOUNT, ACCOUNT_KEY


class Place(ABC):
    """A place of files, by their names in the cache."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The place as typed on a command line."""

    @abstractmethod
    def below(self, name: str) -> Self:
        """Return a place within this one."""

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
        """Return a value per file that changes when the file is written again, even with equal bytes."""

    def timeless(self) -> dict[str, bytes]:
        """Return every file without times: without commit records, the claim, and the source's version."""
        files = {name: data for name, data in self.files().items() if name.split("/")[0] not in ("commits", ".claim")}
        with suppress(KeyError, ValueError):
            build = json.loads(files["build.json"])
            listed = build.get("listed") and build["listed"] | {"source": ""}
            files["build.json"] = json.dumps([build["config"], listed]).encode()
        return files

    def flip(self, name: str) -> None:
        """Flip a bit in the middle of a file."""
        data = bytearray(self.read(name))
        data[len(data) // 2] ^= 1
        self.put(name, bytes(data))

    def mirror(self, other: "Place") -> None:
        """Make this place equal to another."""
        wanted, here = other.files(), self.files()
        self.lose(*(here.keys() - wanted.keys()))
        for name, data in wanted.items():
            if here.get(name) != data:
                self.put(name, data)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Check that nothing is written, renamed or deleted in the block."""
        before = self.marks()
        yield
        assert self.marks() == before


@dataclass(frozen=True)
class Folder(Place):
    path: Path

    @property
    def address(self) -> str:
        return str(self.path)

    def below(self, name: str) -> Self:
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
        """Make this folder equal to another place, without extra folders."""
        shutil.rmtree(self.path, ignore_errors=True)
        super().mirror(other)

    def marks(self) -> dict[str, object]:
        """Return inode and modification time of every file."""
        files = (path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


@dataclass(frozen=True)
class Objects(Place):
    """Objects below a URL, asked of the server itself, past the product and the proxy."""

    url: str
    endpoint: str
    """The endpoint of the server."""

    @property
    def address(self) -> str:
        return self.url

    @cached_property
    def store(self) -> Any:
        from obstore.store import AzureStore, S3Store  # of an extra

        scheme, _, place = self.url.partition("://")
        bucket, _, folder = place.partition("/")
        options: Any = {"prefix": folder or None, "client_options": {"allow_http": True}}
        if scheme == "az":
            keys = {"account_name": ACCOUNT, "account_key": ACCOUNT_KEY}
            return AzureStore(bucket, endpoint=f"{self.endpoint}/{ACCOUNT}", **keys, **options)
        keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
        return S3Store(bucket, endpoint=self.endpoint, **keys, **options)

    def below(self, name: str) -> Self:
        return type(self)(f"{self.url}/{name}", self.endpoint)

    def read(self, name: str) -> bytes:
        return bytes(self.store.get(name).bytes())

    def put(self, name: str, data: bytes) -> None:
        self.store.put(name, data)

    def lose(self, *names: str) -> None:
        for name in names:
            self.store.delete(name)

    def files(self) -> dict[str, bytes]:
        return {name: self.read(name) for name in sorted(self.marks())}

    def marks(self) -> dict[str, object]:
        """Return when each object was written, and its ETag."""
        found = (each for page in self.store.list() for each in page)
        return {each["path"]: (each["last_modified"], each["e_tag"]) for each in found}
