"""Read a sealed cache at memory speed: each shard is mapped once, and a sample is one copy from the page cache.

A *sample number* counts the cached samples in row order, without gaps; rejected rows have no number.
"""

import hashlib
import shlex
from collections.abc import Iterator
from functools import cached_property, lru_cache
from numbers import Real
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.cache.gather import ReadAhead, copy_rows
from cache_store.cache.metadata import read_roll, read_seal, read_spec
from cache_store.cache.sealed_shards import MappedShard, SealedShards, fetch_samples
from cache_store.cache.where import numbers_where, refuse_unknown_columns
from cache_store.errors import CacheError, ConfigError
from cache_store.format.array import ArraySpec, TextRecipe
from cache_store.format.codec import crc32c, decode_sample
from cache_store.format.formats import shard_format
from cache_store.format.normalization import normalize as normalized
from cache_store.format.normalization import refuse_moments
from cache_store.format.plan import caption_of
from cache_store.format.quantized import dequantize
from cache_store.format.roll import Roll
from cache_store.format.schema import Seal, Spec
from cache_store.format.tables import PLANNED_COLUMNS, TOKENS, WITHDRAWN, samples_schema
from cache_store.messages import counted, printable, refuse_other_seal, refuse_unsealed
from cache_store.storage.kept_blocks import LEAST_BYTES
from cache_store.storage.store import Address, Store, is_url, local_path, open_store, with_kept_blocks

READ_BYTES = 8 << 20
"""Bytes copied or decoded at a time: checking then finds them in the CPU cache, and Ctrl-C can act in between."""

CACHE_BYTES = 100 * 10**9
"""Default bound of `cache_dir`, the folder that keeps blocks of caches at URLs."""

SAMPLE_TABLES = 8
"""Number of samples tables kept in memory: their text is large, and readers go shard by shard."""


def open_cache(path: Address, *, cache_dir: str | Path | None = None, cache_bytes: int = CACHE_BYTES) -> "Cache":
    """Open a sealed cache.

    Raises CacheError if it is missing or damaged, StaleError if it is unfinished or its seal belongs to another spec.

    For a cache at a URL, `cache_dir` is a folder that keeps what was read, up to `cache_bytes`. All processes of a
    machine may share it, for any number of caches.
    """
    refuse_cache_bytes(cache_bytes)
    folder = None if cache_dir is None else local_path("cache_dir", cache_dir).absolute()
    store = open_store(path)
    if folder is not None:
        store = with_kept_blocks(store, folder, cache_bytes)
    spec = read_spec(store)
    refuse_unsealed(store, spec)
    seal = read_seal(store)
    refuse_other_seal(store, seal, spec)
    try:
        roll = read_roll(store, seal)
    except CacheError as error:
        raise CacheError(f"{error}; run `cache-store verify {shlex.quote(str(store))}`") from None
    if problem := seal_problem(spec, seal, roll):
        raise CacheError(f"{store}: {problem}; run `cache-store verify {shlex.quote(str(store))}`")
    return Cache(store, spec, seal, roll)


def refuse_cache_bytes(given: object) -> None:
    if not (isinstance(given, Real) and float(given) >= LEAST_BYTES):
        raise ConfigError(
            f"cache_bytes must be a number of at least {LEAST_BYTES:,}, got {printable(repr(given))[:40]}"
        )


def seal_problem(spec: Spec, seal: Seal, roll: Roll) -> str | None:
    """Describe what in the seal contradicts the spec or itself, or return None; no file is read."""
    if seal.cached + seal.rejected != spec.rows or roll.cached.sum() != seal.cached:
        return "the seal's counts do not add up"
    summary, array = seal.array, spec.array
    needs_preview = array.has_preview and not seal.withdrawn  # every shard may have lost a sample
    fits_preview = array.has_preview if summary.preview is not None else not needs_preview
    if len(summary.mean) != array.features or not fits_preview:
        return "the seal's statistics do not fit the spec's array"
    return None


def valid_numbers(numbers: np.ndarray, count: int) -> NDArray[np.int64]:
    """Return a checked copy of sample numbers [N], which no caller can change later; IndexError outside [0, count)."""
    numbers = np.asarray(numbers)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ValueError(f"numbers must be a 1-D integer array, got {numbers.dtype} {numbers.shape}")
    numbers = numbers.astype(np.int64)
    if numbers.size and (numbers.min() < 0 or numbers.max() >= count):
        raise IndexError(f"sample numbers must be in [0, {count}), got {numbers.min()}..{numbers.max()}")
    return numbers


def slices_of(target: NDArray[np.uint8]) -> Iterator[slice]:
    """Split rows [N, bytes] into slices, in order, of at most READ_BYTES each but at least one row."""
    step = max(1, READ_BYTES // target.shape[1])
    return (slice(first, first + step) for first in range(0, len(target), step))


def captions_of(samples: pa.Table, numbers: np.ndarray, seed: int | None, epoch: int) -> list[str | None]:
    """Return a caption of each of these samples, which have these numbers [N], as `Cache.captions` says."""
    for name, value in (("seed", 0 if seed is None else seed), ("epoch", epoch)):
        if not isinstance(value, int | np.integer):
            raise ConfigError(f"captions: {name} must be a whole number, got {value!r}")
    turns = samples["conversations"].to_pylist()
    if seed is None:
        return [caption_of(each) for each in turns]
    hashes = (hashlib.sha256(f"{seed}\n{number}".encode()).digest() for number in np.asarray(numbers).tolist())
    firsts = [int.from_bytes(each[:8], "little") for each in hashes]
    return [caption_of(each, first + epoch) for each, first in zip(turns, firsts, strict=True)]


class Cache:
    """A sealed cache, read-only; safe to share between threads and to fork."""

    # Axes: N samples to read.

    def __init__(self, store: Store, spec: Spec, seal: Seal, roll: Roll) -> None:
        self.store, self.spec, self.seal = store, spec, seal
        self.shards = SealedShards(store, spec, seal, roll)
        self.read_ahead = ReadAhead()
        self._samples_table = lru_cache(maxsize=SAMPLE_TABLES)(self._read_samples)

    def __len__(self) -> int:
        """Number of cached samples."""
        return self.seal.cached

    @property
    def root(self) -> Path | str:
        """The cache's folder, or its URL."""
        return str(self.store) if is_url(self.store) else Path(str(self.store))

    @property
    def name(self) -> str:
        """The last part of the cache's path or URL."""
        return Path(str(self.store)).resolve().name

    @property
    def identity(self) -> str:
        """SHA-256 that names what the cache holds; the order of samples depends on it."""
        return self.seal.identity

    @cached_property
    def columns(self) -> list[str]:
        """Columns that `samples` can return; the plan says which extra ones there are."""
        return [*samples_schema(self.spec.array).names, *PLANNED_COLUMNS, *self.shards.extra]

    def rejected_rows(self) -> NDArray[np.int64]:
        """Return the rejected rows, ascending: int64."""
        return self.shards.rejected_rows()

    def withdrawn_rows(self) -> NDArray[np.int64]:
        """Return the rows whose samples were withdrawn, ascending: int64."""
        return self.shards.rejected_rows(WITHDRAWN) if self.seal.withdrawn else np.empty(0, np.int64)

    @property
    def texts_digest(self) -> str:
        """SHA-256 over the texts that this cache reads: those in force when they were first asked for."""
        return self.shards.texts.texts_digest

    def __repr__(self) -> str:
        return f"Cache({str(self.store)!r}, {counted(len(self), 'sample')} of [{self.spec.array.named_axes}])"

    def __reduce__(self) -> tuple[object, tuple[Store]]:
        return open_cache, (self.store,)

    def read(
        self,
        numbers: np.ndarray,
        out: np.ndarray | None = None,
        *,
        check: bool = True,
        normalize: bool = False,
    ) -> np.ndarray:
        """Read samples by number, in the order of `numbers`: [N, *shape] in the stored dtype, or float32 of uint8.

        `out` reuses a buffer of that shape and dtype; `check=False` skips the crc32c of each sample. `normalize` gives
        float32 in the form on which the encoder's diffusion models are trained (`cache_store.normalize`); a vision
        tower's samples stay unchanged, and those of an own encoder that states no normalisation are refused. Raises
        IndexError for a number outside the cache and CacheError, naming shard and row, for damage.
        """
        if normalize:
            array = self.spec.array
            refuse_moments(array.encoder)
            return normalized(self.read(numbers, out, check=check), array.encoder, array.channel_axis)
        numbers = valid_numbers(numbers, len(self))
        spec = self.array_of(numbers)
        shape = (len(numbers), *spec.shape)
        if out is None:
            out = np.empty(shape, spec.read_dtype)
        fits = isinstance(out, np.ndarray) and out.shape == shape and out.dtype == spec.read_dtype
        if not fits or not (out.flags.c_contiguous and out.flags.writeable):
            raise ValueError(f"out must be a writable C-contiguous {spec.read_dtype} array of shape {shape}")
        if not spec.is_quantized:
            self._read_stored(numbers, out.view(np.uint8).reshape(len(numbers), spec.sample_bytes), check)
            return out
        codes = np.empty(shape, np.uint8)
        self._read_stored(numbers, codes.reshape(len(numbers), spec.sample_bytes), check)
        return dequantize(codes, self.shards.scale(numbers), out)

    def _read_stored(self, numbers: NDArray[np.int64], target: NDArray[np.uint8], check: bool) -> None:
        """Fill `target`, [N, bytes of a sample], with the decoded bytes on disk."""
        if self.store.is_remote:
            self._fetch(numbers, target, check)
            return
        shards = self.shards.shards_of(numbers).tolist()
        by_shard = {shard: self.shards.mapped(shard) for shard in set(shards)}
        mapped = [by_shard[shard] for shard in shards]
        read = self._copy if self.spec.array.codec == "none" else self._decode
        read(numbers, mapped, target, check)

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """The arrays of the cache, one for each size."""
        return self.spec.sized_arrays

    def array_indices(self, numbers: np.ndarray) -> NDArray[np.int64]:
        """Return the index in `arrays` of each sample number [N]."""
        return self.spec.array_indices[self.shards.shards_of(valid_numbers(numbers, len(self)))]

    def array_of(self, numbers: np.ndarray) -> ArraySpec:
        """Return the array that has all these samples; ValueError if they are in several."""
        indices = self.array_indices(numbers)
        first = int(indices[0]) if len(indices) else 0
        if (indices != first).any():
            names = ", ".join(self.spec.names[each] for each in np.unique(indices))
            raise ValueError(f"samples read together must have one size; these have: {names}")
        return self.arrays[first]

    def mask(self, numbers: np.ndarray) -> NDArray[np.bool_]:
        """Read by sample number which tokens are a text's: [N, T], False at padding.

        Raises ConfigError if samples are images, or one vector per text; otherwise the errors of `read`.
        """
        text = self._masked_text()
        numbers = valid_numbers(numbers, len(self))
        shards = set(self.shards.shards_of(numbers).tolist())
        if self.store.is_remote:
            self.shards.locate(shards)
        else:
            for shard in shards:
                self.shards.mapped(shard)
        return text.mask(self.shards.places[TOKENS][numbers])

    def null_text(self) -> np.ndarray:
        """Read the sample of the null prompt, in place of a dropped caption: [*shape] in the stored dtype.

        Raises ConfigError if samples are images, CacheError for damage.
        """
        if self.spec.array.text is None:
            raise ConfigError(f"{self.store} holds samples of images, which have no null prompt")
        return self.shards.null_text()

    def null_mask(self) -> NDArray[np.bool_]:
        """Return which tokens are the null prompt's: [T], False at padding; errors are those of `mask`."""
        text = self._masked_text()
        (mask,) = text.mask(np.array([text.null_tokens]))
        return np.asarray(mask)

    def _masked_text(self) -> TextRecipe:
        text = self.spec.array.text
        if text is None or not self.spec.array.has_mask:
            raise ConfigError(f"{self.store} holds [{self.spec.array.named_axes}], which has no mask of tokens")
        return text

    def samples(self, numbers: np.ndarray, columns: list[str] | None = None) -> pa.Table:
        """Read columns of the plan and the samples tables by sample number, in the order of `numbers`."""
        numbers = valid_numbers(numbers, len(self))
        if columns is None:
            columns = self.columns
        refuse_unknown_columns("samples", columns, self.columns)
        is_planned = not set(samples_schema(self.spec.array).names).issuperset(columns)
        parts, order = [], []
        for shard, positions, local in self._by_shard(numbers):
            parts.append(self._samples_table(shard, is_planned).select(columns).take(local))
            order.append(positions)
        if not parts:
            return self._samples_table(0, is_planned).slice(0, 0).select(columns)
        return pa.concat_tables(parts).take(np.argsort(np.concatenate(order)))

    def captions(self, numbers: np.ndarray, *, seed: int | None = None, epoch: int = 0) -> list[str | None]:
        """Return the caption of each sample: the first answer of its conversation, None if it has none.

        With a `seed`, the one of its captions that is a pure function of (seed, epoch, sample number): each epoch takes
        the next one, and the first is chosen by a hash.
        """
        return captions_of(self.samples(numbers, ["conversations"]), numbers, seed, epoch)

    def where(self, expression: str) -> NDArray[np.int64]:
        """Return the numbers of the samples for which an expression over `columns` is true, ascending.

        Such as `score > 5 and split == "train"`, with `and`, `or`, `not`, `in [...]`, `is null` and parentheses. Shards
        are read one after the other. ConfigError names an unknown column, or the place of what cannot be read.
        """
        return numbers_where(self, expression)

    def _read_samples(self, shard: int, is_planned: bool) -> pa.Table:
        return self.shards.samples(shard, self.columns if is_planned else samples_schema(self.spec.array).names)

    def _by_shard(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        shards = self.shards.shards_of(numbers)
        order = np.argsort(shards, kind="stable")
        bounds = np.flatnonzero(np.diff(shards[order])) + 1
        for positions in np.split(order, bounds) if order.size else []:
            shard = int(shards[positions[0]])
            yield shard, positions, numbers[positions] - self.shards.starts[shard]

    def _copy(self, numbers: np.ndarray, mapped: list[MappedShard], target: NDArray[np.uint8], check: bool) -> None:
        """Copy samples of codec none; this is the hot loop."""
        addresses = self.shards.places["offset"][numbers] + np.array([each.address for each in mapped], np.int64)
        for rows in slices_of(target):
            with self.read_ahead.batch(addresses[rows], target.shape[1]):
                copy_rows(target[rows], addresses[rows], target.shape[1])
                if check:
                    checksums = self.shards.checksums(numbers[rows], addresses[rows] + target.shape[1])
                    self._check(numbers[rows], target[rows], checksums)

    def _check(self, numbers: np.ndarray, copied: NDArray[np.uint8], checksums: NDArray[np.uint32]) -> None:
        size = copied.shape[1]
        data = copied.reshape(-1).data
        for index, expected in enumerate(checksums.tolist()):
            if crc32c(data[index * size : (index + 1) * size]) != expected:
                raise self._damaged(numbers[index], "does not match its crc32c")

    def _decode(self, numbers: np.ndarray, mapped: list[MappedShard], target: NDArray[np.uint8], check: bool) -> None:
        offsets, lengths = (self.shards.places[name][numbers] for name in ("offset", "length"))
        addresses = offsets + np.array([each.address for each in mapped], np.int64)
        for rows in slices_of(target):
            with self.read_ahead.batch(addresses[rows], lengths[rows]):
                checksums = self.shards.checksums(numbers[rows], addresses[rows] + lengths[rows])
                columns = (column.tolist() for column in (offsets[rows], lengths[rows], checksums))
                for number, shard, row, offset, length, expected in zip(
                    numbers[rows], mapped[rows], target[rows], *columns, strict=True
                ):
                    self._decode_one(number, shard.data[offset : offset + length], row, expected if check else None)

    def _fetch(self, numbers: np.ndarray, target: NDArray[np.uint8], check: bool) -> None:
        for index, payload, expected in fetch_samples(self.shards, numbers):
            self._decode_one(numbers[index], payload, target[index], expected if check else None)

    def _decode_one(self, number: int, payload: memoryview, row: NDArray[np.uint8], expected: int | None) -> None:
        if expected is not None and crc32c(payload) != expected:
            raise self._damaged(number, "does not match its crc32c")
        try:
            decode_sample(payload, self.spec.array.codec, row)
        except ValueError as error:
            raise self._damaged(number, str(error)) from None

    def _damaged(self, number: int, problem: str) -> CacheError:
        shard = int(self.shards.shards_of(number))
        try:
            rows = self.shards.samples(shard, ["row", "status"])["row"]
            name = f"row {rows[int(number - self.shards.starts[shard])]}"
        except CacheError:  # the samples table can no longer be read
            name = f"sample {number}"
        return CacheError(
            f"{name} in shard {shard} ({shard_format(self.spec).shard_file(shard)}) {problem}; "
            f"run `cache-store verify {shlex.quote(str(self.store))} --level full`"
        )
