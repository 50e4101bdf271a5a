"""Making the plan from a source's samples, in the memory of one shard and 8 bytes a sample.

A new cache's rows are in the source's own order: that of tars, of Parquet files, of lines of JSON, of another cache.
Samples that lie in no order, in folders and archives or a JSON list, are sorted by id, in memory.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_store.errors import SourceError
from cache_store.format.tables import PLAN_SCHEMA
from precompute.plan.ids import SHOWN_IDS, Hashes, SomeIds, hashes_of
from precompute.plan.rows import Rows, rows_in_scratch
from precompute.sources.archives.listing import Samples

CHUNK = 8_192
"""Samples held as Python objects at a time."""

LISTED = pa.schema([field for field in PLAN_SCHEMA if field.name != "row"])
"""What a source says of a sample."""


def make_plan(samples: Samples, samples_per_shard: int) -> Rows:
    """Samples as a plan, sorted by id where they are in no rows yet; duplicate ids are a SourceError."""
    rows, hashes = iter(samples), list[Hashes]()
    if samples.in_rows:
        shards = iter(lambda: table_of(islice(rows, samples_per_shard)), LISTED.empty_table())
    else:
        shards = slices_of(table_of(rows).sort_by("id").combine_chunks(), samples_per_shard)

    def numbered() -> Iterator[pa.Table]:
        first = 0
        for shard in shards:
            hashes.append(hashes_of(shard["id"].to_pylist()))
            yield shard.add_column(0, PLAN_SCHEMA.field("row"), pa.array(np.arange(first, first + shard.num_rows)))
            first += shard.num_rows

    plan = rows_in_scratch(numbered(), samples_per_shard)
    if not len(plan):
        raise SourceError("; ".join(filter(None, ["the source holds no samples", samples.passed_over])))
    refuse_duplicates(plan, np.concatenate(hashes))
    return plan


def table_of(samples: Iterator[dict[str, object]]) -> pa.Table:
    chunks = iter(lambda: list(islice(samples, CHUNK)), [])
    batches = [pa.RecordBatch.from_pylist(chunk, schema=LISTED) for chunk in chunks]
    return pa.Table.from_batches(batches, schema=LISTED).combine_chunks()


def slices_of(table: pa.Table, size: int) -> Iterator[pa.Table]:
    return (table.slice(first, size) for first in range(0, table.num_rows, size))


def refuse_duplicates(plan: Rows, hashes: Hashes) -> None:
    """Ids of equal hashes are looked up, since others may have them too."""
    ordered = np.sort(hashes)
    repeated = pa.array(np.unique(ordered[1:][ordered[1:] == ordered[:-1]]))
    if not len(repeated):
        return
    counts: Counter[str] = Counter()
    for shard, table in enumerate(plan.shards(["id"])):
        first = shard * plan.samples_per_shard
        is_suspect = pc.is_in(pa.array(hashes[first : first + table.num_rows]), value_set=repeated)
        counts.update(table["id"].filter(is_suspect).to_pylist())
    if names := sorted(name for name, count in counts.items() if count > 1):
        some = SomeIds(len(names), names[:SHOWN_IDS])
        raise SourceError(f"sample ids must be unique; {some.total} occur more than once: {some}")
