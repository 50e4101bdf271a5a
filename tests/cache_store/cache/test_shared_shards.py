"""Several writers of one shard: the first wins; others accept equal bytes and report different ones."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pytest
from msgspec.structs import replace

from cache_store.cache.commit import ShardFiles
from cache_store.cache.metadata import file_record, read_commit, read_samples, read_spec, read_sums
from cache_store.errors import CacheError
from cache_store.format.formats import files_of_shard
from cache_store.format.layout import commit_file
from cache_store.format.record import sign
from cache_store.format.schema import CommitRecord
from cache_store.format.sums import ShardSums
from cache_store.storage.local import LocalFile, LocalStore
from cache_store.storage.protocol import File, Store
from tests.cache_store.conftest import REJECTED
from tests.make_cache import make_cache
from tests.memory_store import MemoryStore


class Killed(BaseException):
    """Ends a writer before its next operation."""


class Gate:
    """Where a writer waits before each operation on its store."""

    def __init__(self) -> None:
        self._arrived, self._go = Semaphore(0), Semaphore(0)
        self._is_killed = self.is_over = False

    def begin(self) -> None:
        """Be there for a new attempt of the writer."""
        self._is_killed = self.is_over = False

    def wait(self) -> None:
        self._arrived.release()
        self._go.acquire()
        if self._is_killed:
            raise Killed

    def end(self) -> None:
        self.is_over = True
        self._arrived.release()

    def arrive(self) -> None:
        """Wait until the writer stands before its next operation, or is over."""
        self._arrived.acquire()

    def open(self, *, kill: bool) -> None:
        """Let the writer do its next operation, or die before it."""
        self._is_killed = kill
        self._go.release()
        self.arrive()


@dataclass(frozen=True)
class GatedFolder(LocalStore):
    """A folder; giving a file its name is one operation. Nothing is synced."""

    gate: Gate

    def sync(self, descriptor: int) -> None:
        return

    def read(self, *arguments: Any) -> bytes:
        self.gate.wait()
        return super().read(*arguments)

    def open(self, *arguments: Any) -> LocalFile:
        self.gate.wait()
        return super().open(*arguments)

    def put_file_if_absent(self, *arguments: Any) -> bool:
        self.gate.wait()
        return super().put_file_if_absent(*arguments)


@dataclass(frozen=True, kw_only=True)
class GatedMemory(MemoryStore):
    """An object store."""

    gate: Gate

    def read(self, *arguments: Any) -> bytes:
        self.gate.wait()
        return super().read(*arguments)

    def open(self, *arguments: Any) -> File:
        self.gate.wait()
        return super().open(*arguments)

    def put_if_absent(self, *arguments: Any) -> bool:
        self.gate.wait()
        return super().put_if_absent(*arguments)


class Shard(NamedTuple):
    """A committed shard: its record, its bytes and its samples table."""

    record: CommitRecord
    data: bytes
    samples: pa.Table
    sums: ShardSums

    @classmethod
    def of(cls, store: LocalStore, device: str) -> Self:
        """Read shard 0, as another device would have written it."""
        record = read_commit(store, 0)
        record = sign(replace(record, run=replace(record.run, device=device)))
        return cls(
            record,
            store.read(record.content.files[0].path),
            read_samples(store, 0),
            read_sums(store, read_spec(store), record.content),
        )


class Writer:
    """Commits a shard again and again, each time in a thread that waits for its turns."""

    def __init__(self, gate: Gate, files: ShardFiles, shard: Shard) -> None:
        self.gate, self._files, self._shard = gate, files, shard
        files.stream.write(shard.data)
        assert files.finish(shard.samples, shard.sums.data) == shard.record.content.files

    def start(self) -> None:
        self.result: CommitRecord | BaseException | None = None
        self.gate.begin()
        Thread(target=self._commit, daemon=True).start()
        self.gate.arrive()

    def _commit(self) -> None:
        try:
            self.result = self._files.commit(self._shard.record)
        except (CacheError, Killed) as error:
            self.result = error
        finally:
            self.gate.end()


def every_schedule(writers: Sequence[Writer], clear: Callable[[], object]) -> Iterator[bool]:
    """Run the writers in every order of their operations, also with one of them killed before any of its own.

    Yield after each operation, and whether all writers are over.
    """
    left: list[list[tuple[int, bool]]] = [[]]
    while left:
        taken, planned = [], iter(left.pop())
        clear()
        for writer in writers:
            writer.start()
        while waiting := [number for number, writer in enumerate(writers) if not writer.gate.is_over]:
            choice = next(planned, None)
            if choice is None:
                kills = [] if any(kill for _, kill in taken) else [(number, True) for number in waiting]
                choice, *others = [*((number, False) for number in waiting), *kills]
                left += ([*taken, other] for other in others)
            taken.append(choice)
            number, kill = choice
            writers[number].gate.open(kill=kill)
            yield all(writer.gate.is_over for writer in writers)


@pytest.fixture(params=["folder", "object store"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, list[GatedFolder | GatedMemory]]:
    """A place, and the same place for each of two writers."""
    if request.param == "folder":
        store = LocalStore(tmp_path / "shared")
        return store, [GatedFolder(store.root, Gate()) for _ in range(2)]
    memory = MemoryStore()
    return memory, [GatedMemory(memory.files, memory.writes, gate=Gate()) for _ in range(2)]


@pytest.mark.parametrize("added", [0, 1], ids=["equal", "different"])
def test_in_every_schedule_of_two_writers_a_record_has_its_own_files(tmp_path, latents, places, added):
    """Also if one of them is killed. Writers of equal bytes end with one record; different ones may both give up."""
    caches = [(tmp_path / "first", latents), (tmp_path / "other", latents + added)]
    first, other = (LocalStore(make_cache(*each, rejected=REJECTED, seal=False)) for each in caches)
    shards, spec, (place, stores) = [Shard.of(first, "cpu"), Shard.of(other, "cuda:7")], read_spec(first), places
    names, ends = [commit_file(0), *files_of_shard(spec, 0)], Counter[str]()
    with ExitStack() as open_files:
        files = [open_files.enter_context(ShardFiles(store, spec, 0, shared=True)) for store in stores]
        writers = [Writer(*each) for each in zip([store.gate for store in stores], files, shards, strict=True)]
        for are_over in every_schedule(writers, lambda: [place.delete(name) for name in names]):
            record = read_commit(place, 0)
            for file in record.content.files if record else ():
                assert file == file_record(place, file.path)
            if not are_over:
                continue
            alive = [writer.result for writer in writers if not isinstance(writer.result, Killed)]
            if added:
                assert all(result == record or isinstance(result, CacheError) for result in alive)
            else:
                assert all(result == record is not None for result in alive)
            ends["no record" if record is None else record.run.device] += 1
    assert {*ends} == {"cpu", "cuda:7"} | ({"no record"} if added else set())
    assert sum(ends.values()) == (314 if added else 382)
