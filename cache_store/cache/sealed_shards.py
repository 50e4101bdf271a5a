"""The shards of a sealed cache, as a reader needs them: files mapped into memory, tables that are the sealed ones."""

import hashlib
import resource
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache_store.cache.files import open_plan
from cache_store.cache.metadata import read_commit
from cache_store.errors import CacheError
from cache_store.format.formats import shard_format
from cache_store.format.names import commit_file, samples_file
from cache_store.format.plan import PlanFile
from cache_store.format.schema import CommitContent, FileRecord, Seal, Spec
from cache_store.format.tables import (
    CACHED,
    MAX_ROW_GROUP_BYTES,
    PLAN_SCHEMA,
    TEXT_COLUMNS,
    TOKENS,
    parse_table,
    samples_schema,
)
from cache_store.storage.store import Store, wait_together

MAPPED_SHARDS = 16_384
"""Shards held open at once, at most; Linux allows 65,530 mappings a process (vm.max_map_count)."""


@dataclass(frozen=True)
class MappedShard:
    """One shard file in memory, which starts at `address` for as long as `data` is held."""

    data: memoryview
    address: int


Places = dict[str, NDArray[Any]]
"""Columns of the samples tables, [cached samples of the cache]: what a read needs to know of where samples lie.

One for the cache, since a shuffled batch from many shards touches nearly as many as it has samples: nothing in a read
is then done by shard. A shard's part is known once it was mapped and then stays, as it was sealed; parts of shards that
were never mapped take no memory.
"""


class SealedShards:
    """Read-only; safe to share between threads and to fork."""

    def __init__(self, store: Store, spec: Spec, seal: Seal) -> None:
        self.store, self.spec, self.seal = store, spec, seal
        self.ends = np.cumsum(seal.cached_per_shard)
        """Of each shard's sample numbers."""
        self.starts = self.ends - seal.cached_per_shard
        self._format = shard_format(spec)
        self._places: list[Places] = []
        self._plan: list[PlanFile] = []
        """Of each list the first counts: threads may make several at once."""
        self.mapped = lru_cache(maxsize=mappable_shards())(self._map)
        """A shard by its number; CacheError where its file or table is not as sealed."""
        self.located = dict[int, FileRecord]()
        """Files of shards that are not mapped, as sealed, whose `places` are known."""
        self._mapped_as: dict[int, tuple[int, bytes]] = {}
        """Of shards that were mapped once: bytes of the file, SHA-256 of the record's file."""

    def of(self, numbers: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """The shards of these sample numbers."""
        return np.searchsorted(self.ends, numbers, side="right")

    def _map(self, shard: int) -> MappedShard:
        file = self._format.shard_file(shard)
        try:
            data = self.store.map(file)
        except OSError as error:
            raise self._broken(f"{file} cannot be read ({error.strerror})") from None
        found = len(data), self._record_sha256(shard)
        if self._mapped_as.get(shard) != found:  # it then takes 0.06 ms in place of 1.8
            self._place(shard, file, len(data))
            self._mapped_as[shard] = found
        return MappedShard(data, np.asarray(data).ctypes.data)

    def _record_sha256(self, shard: int) -> bytes:
        try:
            return hashlib.sha256(self.store.read(commit_file(shard))).digest()
        except OSError:
            return b""  # whoever reads the record says so

    def locate(self, shards: Iterable[int]) -> None:
        """Have `places` of shards that are not mapped; CacheError where a table is not as sealed."""
        wait_together(self.store, self._locate, [*(set(shards) - self.located.keys())])

    def _locate(self, shard: int) -> None:
        content = self._sealed_content(shard)
        data = content.files[0]
        self._place(shard, data.path, data.bytes, content)
        self.located[shard] = data

    def _place(self, shard: int, file: str, size: int, content: CommitContent | None = None) -> None:
        tokens = [TOKENS] if self.spec.array.text else []
        table = self.samples(shard, ["status", "offset", "length", "crc32c", *tokens], content)
        if any(column.null_count for column in table.columns):
            raise self._broken(f"{samples_file(shard)} lacks values that every cached row has")
        offset, length = table["offset"].to_numpy(), table["length"].to_numpy()
        if not ((offset >= 0) & (length > 0) & (length <= size - offset)).all():
            raise self._broken(f"{file} is shorter than its samples table says")
        spec = self.spec.array
        if spec.codec == "none" and (length != spec.sample_bytes).any():
            raise self._broken(f"{file} holds samples of other sizes than {spec.sample_bytes} bytes")
        for name, column in self.places.items():
            column[self.starts[shard] : self.ends[shard]] = table[name].to_numpy()

    @property
    def places(self) -> Places:
        """Of all samples; made at the first shard: what a seal counts is not worth memory before any was found."""
        if not self._places:
            self._places.append(self._unknown_places())
        return self._places[0]

    def _unknown_places(self) -> Places:
        names = ["offset", "crc32c"] if self.spec.array.codec == "none" else ["offset", "length", "crc32c"]
        names += [TOKENS] if self.spec.array.text else []
        types = {name: samples_schema(self.spec.array).field(name).type.to_pandas_dtype() for name in names}
        try:
            return {name: np.empty(self.seal.cached, dtype) for name, dtype in types.items()}
        except MemoryError:
            raise self._broken(f"the seal counts {self.seal.cached:,} samples, more than there is memory for") from None

    def samples(self, shard: int, columns: list[str] | None = None, content: CommitContent | None = None) -> pa.Table:
        """A shard's cached samples, in row order; `status` must be among the columns asked for."""
        file, table = samples_file(shard), self.table(shard, columns, content)
        cached = table.filter(pc.equal(table["status"], CACHED))
        if cached.num_rows != self.seal.cached_per_shard[shard]:
            raise self._broken(f"{file} has {cached.num_rows} cached rows, the seal counts another number")
        return cached

    def table(self, shard: int, columns: list[str] | None = None, content: CommitContent | None = None) -> pa.Table:
        """A shard's planned samples, in row order, from a table that is the sealed one byte for byte.

        Uri and conversations come from the plan's rows of the shard, if they have the digest of the sealed record.

        The record is read after the shard's file was mapped, so that this is not another cache's, put in this one's
        place since it was opened: its samples would pass their own checksums. `content` is of one just read.
        """
        whole = samples_schema(self.spec.array)
        names = [*whole.names, *TEXT_COLUMNS] if columns is None else columns
        content, file = content or self._sealed_content(shard), samples_file(shard)
        schema = pa.schema([whole.field(name) for name in names if name not in TEXT_COLUMNS])
        table = parse_table(self._sealed_bytes(content, file), self.store.where(file), schema.names)
        if table.schema != schema:
            raise self._broken(f"{file} has other columns than the format's")
        if texts := [name for name in TEXT_COLUMNS if name in names]:
            planned = self._planned_rows(content)
            if planned.num_rows != table.num_rows:
                raise self._broken(f"{file} has {table.num_rows} rows, the plan {planned.num_rows}")
            for name in texts:
                table = table.append_column(PLAN_SCHEMA.field(name), planned[name])
        return table.select(names)

    def _planned_rows(self, content: CommitContent) -> pa.Table:
        try:
            if not self._plan:
                self._plan.append(open_plan(self.store))
            return self._plan[0].recorded_rows(content)
        except CacheError as error:
            raise self._broken(str(error)) from None

    def _sealed_content(self, shard: int) -> CommitContent:
        """CacheError where the shard's record is another than was sealed."""
        record = read_commit(self.store, shard)
        if record is None or not self.seal.holds(shard, record.content):
            raise self._broken(f"shard {shard} is not as sealed: the cache was replaced or changed since it was opened")
        return record.content

    def _sealed_bytes(self, content: CommitContent, file: str) -> bytes:
        """A file of a shard; CacheError where it is another than was sealed."""
        sealed = next((each for each in content.files if each.path == file), None)
        if sealed is None:
            raise self._broken(f"{file} is not named by its shard's record")
        try:
            data = self.store.read(file, min(sealed.bytes, MAX_ROW_GROUP_BYTES))
        except OSError as error:
            raise self._broken(f"{file} cannot be read ({error.strerror})") from None
        except CacheError as error:
            raise self._broken(str(error)) from None
        if (digest := hashlib.sha256(data).hexdigest()) != sealed.sha256:
            raise self._broken(f"{file} is not as sealed: its sha256 is {digest[:12]}…")
        return data

    def _broken(self, problem: str) -> CacheError:
        return CacheError(f"{self.store}: {problem}; run `cache-store verify {shlex.quote(str(self.store))}`")


def mappable_shards() -> int:
    """How many shards may stay open: each mapping holds a file handle, of which many systems give 1,024 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(2 * MAPPED_SHARDS, hard) if hard != resource.RLIM_INFINITY else 2 * MAPPED_SHARDS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MAPPED_SHARDS if soft == resource.RLIM_INFINITY else min(MAPPED_SHARDS, soft // 2)
