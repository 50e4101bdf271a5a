"""Reading a sealed cache at memory speed: each shard is mapped once, a sample is one copy out of the page cache.

A *sample number* is dense over the cached samples, in row order; rows of rejected samples have none.
"""

import mmap
import os
import resource
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache_store.checksum import crc32c
from cache_store.codec import decode_sample
from cache_store.errors import CacheError
from cache_store.formats import shard_format
from cache_store.gather import gather
from cache_store.metadata import read_commit, read_seal, read_spec
from cache_store.record import record_digest
from cache_store.regular_file import refuse_irregular
from cache_store.schema import CACHED, LATENTS, SAMPLES_SCHEMA, ArraySpec, Seal, Spec, samples_file
from cache_store.staleness import refuse_other_seal, refuse_unsealed
from cache_store.tables import read_table

MAPPED_SHARDS = 16_384
"""Shards held open at once, at most; Linux allows 65,530 mappings a process (vm.max_map_count)."""

CHECKED_BYTES = 2 << 20
"""Copied at once before it is checked, so that a large batch is checked out of a cache and not out of memory."""

SAMPLE_TABLES = 8
"""Samples tables held at once: their text is large, and readers go shard by shard."""


def open_cache(path: str | Path) -> "Cache":
    """Open a sealed cache; CacheError where it is absent, unfinished or its seal is not its spec's."""
    root = Path(path).expanduser()
    spec = read_spec(root)
    refuse_unsealed(root, spec)
    seal = read_seal(root)
    refuse_other_seal(root, seal, spec)
    if problem := seal_problem(spec, seal):
        raise CacheError(f"{root}: {problem}; run `cache-store verify {shlex.quote(str(root))}`")
    return Cache(root, spec, seal)


def seal_problem(spec: Spec, seal: Seal) -> str | None:
    """What in the seal cannot be so, whatever the files hold."""
    counts = seal.cached_per_shard
    if len(counts) != spec.num_shards or sum(counts) != seal.cached or seal.cached + seal.rejected != spec.rows:
        return "the seal's counts do not add up"
    if any(count > len(spec.shard_rows(shard)) for shard, count in enumerate(counts)):
        return "the seal counts more samples in a shard than it has rows"
    if {name: len(digests) for name, digests in seal.commits.items()} != dict.fromkeys(spec.arrays, spec.num_shards):
        return "the seal names other shards than the spec's"
    channels = {name: array.shape[0] for name, array in spec.arrays.items()}
    if {name: summary.channels for name, summary in seal.arrays.items()} != channels:
        return "the seal sums up other arrays than the spec's"
    return None


@dataclass(frozen=True)
class MappedShard:
    """One shard file in memory, which starts at `address` for as long as `data` is held."""

    data: memoryview
    address: int


@dataclass(frozen=True)
class Places:
    """Where each cached sample of an array lies in its shard's file, [cached samples]; known once the shard was mapped.

    One table for the cache, since a shuffled batch from many shards touches nearly as many as it has samples: nothing
    in a read is then done by shard. Pages of it that no shard has filled take no memory.
    """

    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    crc32c: NDArray[np.uint32]

    @classmethod
    def unknown(cls, samples: int) -> "Places":
        return cls(np.empty(samples, np.int64), np.empty(samples, np.int64), np.empty(samples, np.uint32))


class Cache:
    """A sealed cache, read-only; safe to share between threads and to fork."""

    # Axes: N samples asked for, C channels, H W latent cells.

    def __init__(self, root: Path, spec: Spec, seal: Seal) -> None:
        self.root, self.spec, self.seal = root, spec, seal
        self._format = shard_format(spec)
        self._ends = np.cumsum(seal.cached_per_shard)
        self._starts = self._ends - seal.cached_per_shard
        self._places = {array: Places.unknown(len(self)) for array in spec.arrays}
        self._mapped = lru_cache(maxsize=mappable_shards())(self._map_shard)
        self._samples_table = lru_cache(maxsize=SAMPLE_TABLES)(self._read_texts)

    def __len__(self) -> int:
        """Number of cached samples."""
        return self.seal.cached

    def __repr__(self) -> str:
        return f"Cache({str(self.root)!r}, {len(self)} samples, arrays {list(self.spec.arrays)})"

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return open_cache, (self.root,)

    def read(
        self,
        numbers: np.ndarray,
        out: np.ndarray | None = None,
        *,
        check: bool = True,
        array: str = LATENTS,
    ) -> np.ndarray:
        """Samples by number, in the order asked for: [N, C, H, W] in the stored dtype.

        `out` reuses a buffer of that shape and dtype; `check=False` skips the crc32c of each sample. Raises
        IndexError for a number outside the cache and CacheError, naming shard and row, for damage.
        """
        numbers = self._valid(numbers)
        spec = self.array_spec(array)
        shape = (len(numbers), *spec.shape)
        if out is None:
            out = np.empty(shape, spec.numpy_dtype)
        if out.shape != shape or out.dtype != spec.numpy_dtype or not out.flags.c_contiguous:
            raise ValueError(f"out must be a C-contiguous {spec.dtype} array of shape {shape}")
        shards = np.searchsorted(self._ends, numbers, side="right").tolist()
        mapped = {shard: self._mapped(array, shard) for shard in set(shards)}
        target = out.view(np.uint8).reshape(len(numbers), spec.sample_bytes)
        if spec.codec == "none":
            self._copy(array, numbers, [mapped[shard].address for shard in shards], target, check)
        else:
            self._decode(array, numbers, [mapped[shard].data for shard in shards], target, check)
        return out

    def samples(self, numbers: np.ndarray, columns: list[str] | None = None) -> pa.Table:
        """Rows of the samples table by sample number, in the order asked for."""
        numbers = self._valid(numbers)
        parts, order = [], []
        for shard, positions, local in self._by_shard(numbers):
            table = self._samples_table(shard)
            parts.append((table if columns is None else table.select(columns)).take(local))
            order.append(positions)
        if not parts:
            empty = self._samples_table(0).slice(0, 0)
            return empty if columns is None else empty.select(columns)
        return pa.concat_tables(parts).take(np.argsort(np.concatenate(order)))

    def array_spec(self, array: str) -> ArraySpec:
        """What a row of an array holds and how it was made; CacheError where the cache has no such array."""
        try:
            return self.spec.arrays[array]
        except KeyError:
            raise CacheError(f"{self.root} has no array {array!r}; it has {list(self.spec.arrays)}") from None

    def _valid(self, numbers: np.ndarray) -> np.ndarray:
        numbers = np.asarray(numbers)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise ValueError(f"numbers must be a 1-D integer array, got {numbers.dtype} {numbers.shape}")
        numbers = numbers.astype(np.int64, copy=False)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= len(self)):
            raise IndexError(f"sample numbers must be in [0, {len(self)}), got {numbers.min()}..{numbers.max()}")
        return numbers

    def _by_shard(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For each shard touched: its number, positions in `numbers`, and the samples' places within the shard."""
        shards = np.searchsorted(self._ends, numbers, side="right")
        order = np.argsort(shards, kind="stable")
        bounds = np.flatnonzero(np.diff(shards[order])) + 1
        for positions in np.split(order, bounds) if order.size else []:
            shard = int(shards[positions[0]])
            yield shard, positions, numbers[positions] - self._starts[shard]

    def _copy(self, array: str, numbers: np.ndarray, starts: list[int], target: NDArray[np.uint8], check: bool) -> None:
        """The hot loop of the codec none: samples are copied, and those just copied checked before the next."""
        addresses = self._places[array].offset[numbers] + np.array(starts, np.int64)
        samples, size = target.shape
        step = max(1, CHECKED_BYTES // size if check else samples)
        for first in range(0, samples, step):
            rows = slice(first, first + step)
            gather(target[rows], addresses[rows], size)
            if check:
                self._check(array, numbers[rows], target[rows])

    def _check(self, array: str, numbers: np.ndarray, copied: NDArray[np.uint8]) -> None:
        size = copied.shape[1]
        data = copied.reshape(-1).data
        for index, expected in enumerate(self._places[array].crc32c[numbers].tolist()):
            if crc32c(data[index * size : (index + 1) * size]) != expected:
                raise self._damaged(array, numbers[index], "does not match its crc32c")

    def _decode(
        self, array: str, numbers: np.ndarray, files: list[memoryview], target: NDArray[np.uint8], check: bool
    ) -> None:
        codec, places = self.spec.arrays[array].codec, self._places[array]
        columns = (column[numbers].tolist() for column in (places.offset, places.length, places.crc32c))
        for number, file, row, offset, length, expected in zip(numbers, files, target, *columns, strict=True):
            payload = file[offset : offset + length]
            if check and crc32c(payload) != expected:
                raise self._damaged(array, number, "does not match its crc32c")
            try:
                decode_sample(payload, codec, row)
            except ValueError as error:
                raise self._damaged(array, number, str(error)) from None

    def _damaged(self, array: str, number: int, problem: str) -> CacheError:
        shard = int(np.searchsorted(self._ends, number, side="right"))
        row = self._read_samples(shard, ["row", "status"])["row"][int(number - self._starts[shard])]
        return CacheError(
            f"row {row} in shard {shard} ({self._format.shard_file(array, shard)}) {problem}; "
            f"run `cache-store verify {shlex.quote(str(self.root))} --level full`"
        )

    def _map_shard(self, array: str, shard: int) -> MappedShard:
        file = self._format.shard_file(array, shard)
        try:
            data = map_file(self.root / file)
        except OSError as error:
            raise self._broken(f"{file} cannot be read ({error.strerror})") from None
        table = self._read_samples(shard, ["status", "offset", "length", "crc32c"])
        self._refuse_replaced(array, shard)
        offset, length, checksum = (table[name].to_numpy() for name in ("offset", "length", "crc32c"))
        if not ((offset >= 0) & (length > 0) & (length <= len(data) - offset)).all():
            raise self._broken(f"{file} is shorter than its samples table says")
        spec = self.spec.arrays[array]
        if spec.codec == "none" and (length != spec.sample_bytes).any():
            raise self._broken(f"{file} holds samples of other sizes than {spec.sample_bytes} bytes")
        places, samples = self._places[array], slice(self._starts[shard], self._ends[shard])
        places.offset[samples], places.length[samples], places.crc32c[samples] = offset, length, checksum
        return MappedShard(data, np.asarray(data).ctypes.data)

    def _read_texts(self, shard: int) -> pa.Table:
        table = self._read_samples(shard)
        self._refuse_replaced(next(iter(self.spec.arrays)), shard)
        return table

    def _refuse_replaced(self, array: str, shard: int) -> None:
        """CacheError where a shard, whose files are open by now, is another than was sealed.

        Its samples would pass their own checksums: a cache that is put in this one's place while it is read may have
        the same shape, and other latents and texts.
        """
        record = read_commit(self.root, array, shard)
        if record is None or record_digest(record.content) != self.seal.commits[array][shard]:
            raise self._broken(f"shard {shard} is not as sealed: the cache was replaced or changed since it was opened")

    def _read_samples(self, shard: int, columns: list[str] | None = None) -> pa.Table:
        """A shard's cached samples, in row order."""
        file = samples_file(shard)
        table = read_table(self.root / file, columns)
        expected = SAMPLES_SCHEMA if columns is None else pa.schema([SAMPLES_SCHEMA.field(name) for name in columns])
        if table.schema != expected:
            raise self._broken(f"{file} has other columns than the format's")
        cached = table.filter(pc.equal(table["status"], CACHED))
        if cached.num_rows != self.seal.cached_per_shard[shard]:
            raise self._broken(f"{file} has {cached.num_rows} cached rows, the seal counts another number")
        return cached

    def _broken(self, problem: str) -> CacheError:
        return CacheError(f"{self.root}: {problem}; run `cache-store verify {shlex.quote(str(self.root))}`")


def mappable_shards() -> int:
    """How many shards may stay open: each mapping holds a file handle, of which many systems give 1,024 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(2 * MAPPED_SHARDS, hard) if hard != resource.RLIM_INFINITY else 2 * MAPPED_SHARDS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MAPPED_SHARDS if soft == resource.RLIM_INFINITY else min(MAPPED_SHARDS, soft // 2)


def map_file(path: Path) -> memoryview:
    """The file's bytes, read-only, paged in as they are touched."""
    refuse_irregular(path)
    with path.open("rb") as stream:
        if not os.fstat(stream.fileno()).st_size:
            return memoryview(b"")  # which mmap refuses
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
