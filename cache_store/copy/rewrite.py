"""Rewrite a shard without its withdrawn samples: the others are copied, and no encoder runs.

The new files replace the old ones in turn, the shard file first and the record last, so a stopped rewriting can be
resumed. The old record tells whether the shard file was replaced; if it was, its samples lie where a writer puts them.
"""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache_store.cache.metadata import read_samples
from cache_store.cache.writer import WITHDRAWN_SAMPLE, Outcome, ShardBuilder, non_finite_values, rows_of
from cache_store.copy.new_form import CacheAt
from cache_store.copy.reshard import BATCH_BYTES
from cache_store.errors import CacheError
from cache_store.format.codec import crc32c, decode_sample
from cache_store.format.formats import shard_format
from cache_store.format.layout import commit_file
from cache_store.format.plan import is_withdrawn
from cache_store.format.quantized import Scale, dequantize
from cache_store.format.schema import CommitRecord
from cache_store.format.shards import Location, ShardSamples
from cache_store.format.tables import WITHDRAWN, samples_schema
from cache_store.verify.record import file_finding, table_problem


def rewrite_shard(cache: CacheAt, record: CommitRecord, planned: pa.Table) -> CommitRecord:
    """Write the shard of `record` again for its rows of the new plan, `planned`; return its new record.

    CacheError if the shard is damaged, or if the plan withdraws none of its samples.
    """
    shard = record.content.shard
    try:
        return copy_without_withdrawn(cache, record, planned)
    except CacheError as error:
        raise CacheError(
            f"{cache.store}: shard {shard} cannot be copied without its withdrawn samples: {error}; delete "
            f"{cache.store.where(commit_file(shard))}, then run the `precompute build` of this cache, which encodes "
            "the shard again"
        ) from None


def copy_without_withdrawn(cache: CacheAt, record: CommitRecord, planned: pa.Table) -> CommitRecord:
    (store, spec), shard = cache, record.content.shard
    old = OldShard(cache, record, planned)
    outcomes = old.outcomes()
    step = max(1, BATCH_BYTES // old.array.sample_bytes)
    with ShardBuilder(store, spec, shard, planned, rewritten=True) as builder:
        for first in range(0, len(outcomes), step):
            rows = range(first, min(first + step, len(outcomes)))
            builder.append_encoded(*old.samples(rows), outcomes[first : rows.stop])
        if (null_text := old.null_text()) is not None:
            builder.add_null_text(null_text)
        left = sum(outcome.reason is None for outcome in outcomes)
        inherited = {
            "non_finite": sum(map(non_finite_values, outcomes)),
            # no table tells which rows these are
            "remarks": {name: min(number, left) for name, number in record.content.remarks.items() if left},
        }
        return builder.commit_run(record.run, inherited)


class OldShard:
    """A shard as it is on disk, of which some samples are withdrawn in the plan; perhaps half replaced already."""

    def __init__(self, cache: CacheAt, record: CommitRecord, planned: pa.Table) -> None:
        self._store, self._spec = cache
        self._shard, self._withdrawn = record.content.shard, is_withdrawn(planned)
        self.array = self._spec.array_of(self._shard)
        data, table, *self._null_text = record.content.files
        wrong_data, wrong_table = (file_finding(self._store, each) for each in (data, table))
        self._samples = self._read_table(planned)
        if wrong_table and not (wrong_data and self._is_rewritten):
            raise CacheError(str(wrong_table))
        self._places = [*self._places_after()] if wrong_data else self._locations_left()
        try:
            self._data = self._store.map(data.path)
        except FileNotFoundError:
            raise CacheError(str(wrong_data)) from None

    def _read_table(self, planned: pa.Table) -> ShardSamples:
        samples = ShardSamples(self._spec, self._shard, read_samples(self._store, self._shard), planned)
        if problem := table_problem(samples):
            raise CacheError(f"its samples table {problem}")
        if not samples.table["id"].equals(planned["id"]) or not self._withdrawn.any():
            raise CacheError("it was made for other samples than the plan's")
        return samples

    @property
    def _is_rewritten(self) -> bool:
        """Whether the samples table is of a rewriting that was stopped before it replaced the record."""
        reasons = self._samples.table["reason"].filter(pa.array(self._withdrawn))
        return bool(pc.all(pc.equal(reasons, WITHDRAWN).fill_null(False)).as_py())

    def _places_after(self) -> Iterator[Location | None]:
        """Yield the places of the samples that stay, as the writer of the new file chose them by their lengths."""
        stream = io.BytesIO()
        writer = shard_format(self._spec).writer(stream, self._shard, self._samples.planned)
        for location, outcome in zip(self._locations_left(), self.outcomes(), strict=True):
            payloads = [bytes(location.length)] if location else []  # only the places are wanted
            checksums = np.array([location.crc32c] if location else [], np.uint32)
            kept = np.array([location is not None])
            (place,) = writer.append(rows_of(payloads, kept, checksums, [outcome])).tolist()
            yield Location(*place) if location else None
            stream.seek(0)

    def _locations_left(self) -> list[Location | None]:
        pairs = zip(self._samples.locations, self._withdrawn.tolist(), strict=True)
        return [None if is_gone else location for location, is_gone in pairs]

    def outcomes(self) -> Sequence[Outcome]:
        """Return the outcome of every row: as in the samples table, or withdrawn."""
        fields = [name for name in Outcome._fields if name in samples_schema(self.array).names]
        rows = zip(self._samples.table.select(fields).to_pylist(), self._withdrawn.tolist(), strict=True)
        return [WITHDRAWN_SAMPLE if is_gone else Outcome(**values) for values, is_gone in rows]

    def samples(self, rows: range) -> tuple[list[memoryview], NDArray[Any]]:
        """Read the samples of these rows of the shard that stay: as encoded, and as they are read, [N, *shape]."""
        left = {row: place for row in rows if (place := self._places[row]) is not None}
        payloads, stored = list[memoryview](), np.empty((len(left), self.array.sample_bytes), np.uint8)
        for (row, place), decoded in zip(left.items(), stored, strict=True):
            payload = self._data[place.offset : place.offset + place.length]
            if crc32c(payload) != place.crc32c:
                raise CacheError(f"row {self._samples.rows[row]} does not match its crc32c")
            decode_sample(payload, self.array.codec, decoded)
            payloads.append(payload)
        values = stored.view(self.array.numpy_dtype).reshape(len(left), *self.array.shape)
        if (scale := self._samples.scale) is not None:
            values = dequantize(values, Scale(*(column[[*left]] for column in scale)))
        return payloads, values

    def null_text(self) -> NDArray[np.float32] | None:
        """Read the null prompt's sample, if the shard has it."""
        for file in self._null_text:
            if finding := file_finding(self._store, file):
                raise CacheError(str(finding))
            values = np.frombuffer(self._store.read(file.path), self.array.numpy_dtype)
            return values.reshape(self.array.shape).astype(np.float32)
        return None
