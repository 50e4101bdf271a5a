"""Copy samples from committed shards into a new one, without an encoder: for other forms, packed shards, withdrawals.

Each sample is checked when it is read, and again in the new file.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache_store.cache.metadata import read_samples, read_sums
from cache_store.cache.writer import WITHDRAWN_SAMPLE, Outcome, ShardBuilder, rows_of
from cache_store.errors import CacheError
from cache_store.format.codec import crc32c, decode_sample, encode_sample
from cache_store.format.formats import shard_format
from cache_store.format.plan import is_withdrawn
from cache_store.format.quantized import Scale, dequantize
from cache_store.format.schema import CommitRecord, Spec
from cache_store.format.shards import Location, ShardSamples
from cache_store.format.sums import ShardSums
from cache_store.format.tables import WITHDRAWN, samples_schema
from cache_store.storage.store import Store
from cache_store.verify.record import file_finding, table_problem

BATCH_BYTES = 64 * 2**20
"""Most bytes of samples in memory, but at least one sample."""


class CacheAt(NamedTuple):
    """A cache's store and spec."""

    store: Store
    spec: Spec


class OldShardError(CacheError):
    """A shard cannot be copied, because it is damaged."""


class OldShard:
    """A committed shard whose samples are copied, except those that are withdrawn in the plan.

    `planned` has its rows of the plan. A `rewritten` shard may be half replaced by its own copy.
    """

    def __init__(self, cache: CacheAt, record: CommitRecord, planned: pa.Table, *, rewritten: bool = False) -> None:
        self._store, self._spec = cache
        self.record, self._shard = record, record.content.shard
        self._gone, self._array = is_withdrawn(planned), self._spec.array_of(self._shard)
        data, table, *self._null_text = record.content.files
        self._file = data.path
        wrong_table = file_finding(self._store, table)
        self._samples = self._read_table(planned)
        wrong_data = file_finding(self._store, data) if rewritten else None
        self._is_replaced = wrong_table is not None
        if wrong_table and not (wrong_data and self._is_rewritten):
            raise OldShardError(str(wrong_table))
        self._outcomes = [*self._read_outcomes()]
        self._places = [*self._places_after()] if wrong_data else self._locations_left()
        try:
            self._data = self._store.map(data.path)
        except FileNotFoundError:
            raise OldShardError(f"{data.path} is missing") from None

    def _read_table(self, planned: pa.Table) -> ShardSamples:
        try:
            table = read_samples(self._store, self._shard)
        except CacheError as error:
            raise OldShardError(str(error)) from None
        samples = ShardSamples(self._spec, self._shard, table, planned)
        if problem := table_problem(samples):
            raise OldShardError(f"its samples table {problem}")
        if not table["id"].equals(planned["id"]):
            raise OldShardError("it was made for other samples than the plan's")
        return samples

    @property
    def _is_rewritten(self) -> bool:
        """Whether a stopped rewriting has replaced the samples table, but not the record."""
        reasons = self._samples.table["reason"].filter(pa.array(self._gone))
        return bool(pc.all(pc.equal(reasons, WITHDRAWN).fill_null(False)).as_py())

    def _read_outcomes(self) -> Iterator[Outcome]:
        fields = [name for name in Outcome._fields if name in samples_schema(self._array).names]
        for values, is_gone in zip(self._samples.table.select(fields).to_pylist(), self._gone.tolist(), strict=True):
            yield WITHDRAWN_SAMPLE if is_gone else Outcome(**values)

    def _locations_left(self) -> list[Location | None]:
        pairs = zip(self._samples.locations, self._gone.tolist(), strict=True)
        return [None if is_gone else location for location, is_gone in pairs]

    def _places_after(self) -> Iterator[Location | None]:
        """Yield the places of the remaining samples in the new file; they follow from the samples' lengths."""
        stream = io.BytesIO()
        writer = shard_format(self._spec).writer(stream, self._shard, self._samples.planned)
        for location, outcome in zip(self._locations_left(), self._outcomes, strict=True):
            payloads = [bytes(location.length)] if location else []  # only the places are wanted
            checksums = np.array([location.crc32c] if location else [], np.uint32)
            kept = np.array([location is not None])
            (place,) = writer.append(rows_of(payloads, kept, checksums, [outcome])).tolist()
            yield Location(*place) if location else None
            stream.seek(0)

    def samples(self, slots: range, codec: str) -> tuple[Sequence[bytes | memoryview], NDArray[Any], Sequence[Outcome]]:
        """Read rows of the shard: the remaining samples, encoded by `codec` and decoded, and all rows' outcomes."""
        left = {slot: place for slot in slots if (place := self._places[slot]) is not None}
        payloads = list[bytes | memoryview]()
        stored = np.empty((len(left), self._array.sample_bytes), np.uint8)
        for (slot, place), decoded in zip(left.items(), stored, strict=True):
            payload = self._data[place.offset : place.offset + place.length]
            if crc32c(payload) != place.crc32c:
                row = self._samples.rows[slot]
                raise OldShardError(f"row {row} in shard {self._shard} ({self._file}) does not match its crc32c")
            decode_sample(payload, self._array.codec, decoded)
            payloads.append(payload if codec == self._array.codec else self._recoded(decoded, codec))
        values = stored.view(self._array.numpy_dtype).reshape(len(left), *self._array.shape)
        if (scale := self._samples.scale) is not None:
            values = dequantize(values, Scale(*(column[[*left]] for column in scale)))
        return payloads, values, self._outcomes[slots.start : slots.stop]

    def _recoded(self, decoded: NDArray[np.uint8], codec: str) -> bytes:
        encoded, again = encode_sample(decoded.view(f"<u{self._array.numpy_dtype.itemsize}"), codec), decoded.copy()
        decode_sample(memoryview(encoded), codec, again)
        assert np.array_equal(decoded, again), codec
        return encoded

    def sums(self) -> ShardSums | None:
        """Read the shard's sums; None if it was rewritten already, and has lost its preview's equations."""
        return None if self._is_replaced else read_sums(self._store, self._spec, self.record.content)

    def null_text(self) -> NDArray[np.float32] | None:
        for file in self._null_text:
            if finding := file_finding(self._store, file):
                raise OldShardError(str(finding))
            values = np.frombuffer(self._store.read(file.path), self._array.numpy_dtype)
            return values.reshape(self._array.shape).astype(np.float32)
        return None


def copy_samples(
    target: CacheAt, shard: int, planned: pa.Table, parts: Iterable[tuple[OldShard, range]], *, rewritten: bool = False
) -> CommitRecord:
    """Write a shard from rows of old shards, in order; return its record.

    Facts of a whole old shard go to the new shard in which it begins.
    """
    array, runs = target.spec.array_of(shard), []
    step = max(1, BATCH_BYTES // array.sample_bytes)
    with ShardBuilder(*target, shard, planned, rewritten=rewritten) as builder:
        for old, slots in parts:
            for first in range(slots.start, slots.stop, step):
                builder.append_encoded(*old.samples(range(first, min(first + step, slots.stop)), array.codec))
            if slots.start == 0:
                builder.inherit(old.record.content, old.sums())
                if (null_text := old.null_text()) is not None:
                    builder.add_null_text(null_text)
            runs.append(old.record.run)
        return builder.commit_run(runs[0])
