"""A store without a disk or a network: a dictionary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cache_store.storage.protocol import (
    MAX_READ_BYTES,
    Data,
    Ranges,
    Version,
    changed_error,
    cut_short_error,
    missing_error,
    too_large_error,
)
from cache_store.storage.remote import RemoteStore


@dataclass(frozen=True)
class MemoryStore(RemoteStore):
    """The eight verbs over a dictionary."""

    files: dict[str, bytes] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict, compare=False)
    """Number of writes of each file."""

    def __str__(self) -> str:
        return "memory://store"

    def stat(self, name: str) -> Version:
        return Version(len(self._data(name)), str(self.writes[name]))

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        if (size := len(self._data(name))) > at_most:
            raise too_large_error(self.where(name), size, at_most)
        return self.files[name]

    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        return [[*self._parts(each)] for each in wanted]

    def _parts(self, wanted: Ranges) -> Iterator[memoryview]:
        if wanted.version not in (None, self.stat(wanted.name)):
            raise changed_error(self.where(wanted.name))
        for start, length in zip(wanted.starts, wanted.lengths, strict=True):
            part = memoryview(self.files[wanted.name])[start : start + length]
            if len(part) < length:
                raise cut_short_error(self.where(wanted.name))
            yield part

    def list(self, folder: str = "") -> list[str]:
        below = [name.removeprefix(f"{folder}/") for name in self.files if name.startswith(folder and f"{folder}/")]
        return sorted({name.partition("/")[0] + "/" * ("/" in name) for name in below})

    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        return ((name, self.stat(name)) for name in sorted(self.files) if name > after)

    def put_whole(self, name: str, data: Data) -> None:
        self.files[name] = bytes(data)
        self.writes[name] = self.writes.get(name, 0) + 1

    def put_if_absent(self, name: str, data: Data) -> bool:
        if name not in self.files:
            self.put_whole(name, data)
        return self.files[name] == data

    def delete(self, name: str) -> None:
        self.files.pop(name, None)

    def _data(self, name: str) -> bytes:
        if name not in self.files:
            raise missing_error(self.where(name))
        return self.files[name]
