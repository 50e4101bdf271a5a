"""Pack short shards into full ones, by copying samples: no image is read and no encoder runs.

A cache that grew has a short shard for each extension. The copy has the same rows, samples and statistics, and another
identity. Some facts of a record cannot be divided among samples: the equations of the preview, and the counts of broken
EXIF and of values that were not finite. They go to the new shard in which the old one begins.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from cache_store.cache.metadata import open_plan
from cache_store.cache.reader import Cache
from cache_store.cache.survey import ShardOnDisk
from cache_store.cache.writer import Outcome, ShardBuilder
from cache_store.copy.new_form import CacheAt
from cache_store.format.array import ArraySpec
from cache_store.format.layout import SEAL_FILE
from cache_store.format.quantized import Scale
from cache_store.format.schema import CommitContent, CommitRecord, CommitRun, PreviewEquations, Spec, even_shards
from cache_store.format.sums import to_tuples
from cache_store.format.tables import samples_schema
from cache_store.verify.record import usable_record

ShardsThere = Mapping[int, ShardOnDisk]

BATCH_BYTES = 64 * 2**20
"""Most bytes of samples in memory, but at least one sample."""


def packed(spec: Spec) -> Spec:
    """Return the spec with neighbouring shards of one array made as long as they may be."""
    shards = (
        run
        for array, runs in groupby(spec.shards, lambda run: run.array)
        for run in even_shards(sum(each.shards * each.rows for each in runs), spec.samples_per_shard, array)
    )
    return msgspec.structs.replace(spec, shards=tuple(shards))


class Packer:
    """Copies the samples of a sealed cache into the shards of a packed one, whose plan and spec are on disk."""

    def __init__(self, source: Cache, records: Mapping[int, CommitRecord], target: CacheAt, there: ShardsThere) -> None:
        """Open the new plan. `records` are the source's; `there` has the shards that the target holds already."""
        self._source, self._records, self._target, self._there = source, records, target, there
        self._plan, self._rejected = open_plan(target.store), source.rejected_rows()

    def __call__(self, shard: int) -> tuple[CommitRecord, bool]:
        """Pack a shard unless it is there, undamaged; return its record, and whether it was packed now.

        Raises CacheError if the source is damaged.
        """
        store, spec = self._target
        if shard in self._there:
            held, problem = usable_record(spec, shard, self._there[shard])
            if held and not problem:
                return held, False
        store.delete(SEAL_FILE)
        rows, array = spec.shard_rows(shard), spec.array_of(shard)
        step = max(1, BATCH_BYTES // array.sample_bytes)
        with ShardBuilder(store, spec, shard, self._plan.shard(shard)) as builder:
            for first in range(rows.start, rows.stop, step):
                builder.append(*self._samples(range(first, min(first + step, rows.stop)), array))
            if shard == 0 and array.text is not None:
                builder.add_null_text(self._source.null_text().astype(np.float32))
            return builder.commit_run(*self._inherited(rows, array)), True

    def _samples(
        self, rows: range, array: ArraySpec
    ) -> tuple[np.ndarray, np.ndarray | None, list[Outcome], Scale | None]:
        """Read rows of the source, in the form that a shard's builder takes; pictures are black."""
        outcomes = [*self._outcomes(rows)]
        kept = np.array([outcome.reason is None for outcome in outcomes])
        numbers = np.array(rows)[kept]
        numbers -= np.searchsorted(self._rejected, numbers)
        samples = np.zeros((len(rows), *array.shape), np.float32)
        scale = Scale(*np.zeros((2, len(rows), array.features), np.float32)) if array.is_quantized else None
        if len(numbers):
            samples[kept] = self._source.read(numbers).astype(np.float32)
        if len(numbers) and scale:
            for column, found in zip(scale, self._source.shards.scale(numbers), strict=True):
                column[kept] = found
        rgb = np.zeros((len(rows), *array.preview_cells, 3), np.float32) if array.has_preview else None
        return samples, rgb, outcomes, scale

    def _outcomes(self, rows: range) -> Iterator[Outcome]:
        """Yield the outcomes of rows, from the source's samples tables."""
        spec = self._source.spec
        fields = [name for name in Outcome._fields if name in samples_schema(spec.array).names]
        for shard in range(spec.shard_of_row(rows.start), spec.shard_of_row(rows[-1]) + 1):
            start = spec.shard_rows(shard).start
            table = self._source.shards.table(shard, fields).slice(max(rows.start - start, 0))
            for values in table.slice(0, rows.stop - max(rows.start, start)).to_pylist():
                yield Outcome(**values)

    def _inherited(self, rows: range, array: ArraySpec) -> tuple[CommitRun, dict[str, Any]]:
        """Return the run of the first old shard in `rows`, and the facts of the old shards that begin there."""
        first = self._source.spec.shard_of_row(rows.start)
        last = self._source.spec.shard_of_row(rows[-1])
        contents = [self._records[shard].content for shard in range(first, last + 1)]
        begun = [each for each in contents if each.first_row in rows]
        numbers = np.array(rows)
        has_samples = not np.isin(numbers, self._rejected).all()
        return self._records[first].run, {
            "remarks": dict(sum((Counter(each.remarks) for each in begun), Counter())),
            "non_finite": sum(each.non_finite for each in begun),
            "preview": added_up(begun, array) if array.has_preview and has_samples else None,
        }


def added_up(contents: Sequence[CommitContent], array: ArraySpec) -> PreviewEquations:
    """Add up the equations of shards; zeros if there are none."""
    inputs = array.features + 1
    found = [each.preview for each in contents if each.preview is not None]
    gram = sum((np.array(each.gram) for each in found), np.zeros((inputs, inputs)))
    moment = sum((np.array(each.moment) for each in found), np.zeros((inputs, 3)))
    return PreviewEquations(gram=to_tuples(gram), moment=to_tuples(moment))
