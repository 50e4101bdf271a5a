"""Making the plan from a source's samples, in the memory of one shard and 8 bytes a sample.

A new cache's rows are in the source's own order: that of tars, of Parquet files, of lines of JSON, of another cache.
Samples that lie in no order, in folders and archives or a JSON list, are sorted by id.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_store.errors import SourceError
from cache_store.refusal import counted
from precompute.rerun.ids import Hashes, abridged, hashes_of
from precompute.rerun.rows import LISTED, Rows, numbered, rows_in_scratch, table_of
from precompute.rerun.sort import sorted_by_id
from precompute.sources.archives.listing import Samples

MAX_ID_BYTES = 2**14
"""An id stands in the plan, in a samples table and in messages; the longest path of a file has 4 KB."""


def make_plan(samples: Samples, samples_per_shard: int, source: str = "the source") -> Rows:
    """Samples as a plan, sorted by id where they are in no rows yet; SourceError for duplicate ids, or no sample."""
    rows, hashes = iter(samples), list[Hashes]()
    if samples.in_rows:
        shards = iter(lambda: table_of(islice(rows, samples_per_shard)), LISTED.empty_table())
    else:
        shards = sorted_by_id(rows, samples_per_shard)

    def hashed() -> Iterator[pa.Table]:
        for shard in shards:
            refuse_long_ids(shard, source)
            hashes.append(hashes_of(shard["id"].to_pylist()))
            yield shard

    plan = rows_in_scratch(numbered(hashed()), samples_per_shard)
    if not len(plan):
        raise SourceError("; ".join(filter(None, [f"{source} holds no samples", samples.passed_over])))
    refuse_duplicates(plan, np.concatenate(hashes), source)
    return plan


def refuse_long_ids(shard: pa.Table, source: str) -> None:
    lengths = pc.binary_length(shard["id"])
    if (longest := pc.max(lengths).as_py() or 0) > MAX_ID_BYTES:
        begins = shard["id"][pc.index(lengths, longest).as_py()].as_py()[:20]
        raise SourceError(
            f"{source}: a sample id of {longest:,} bytes, more than {MAX_ID_BYTES:,}, begins {abridged([begins])}"
        )


def refuse_duplicates(plan: Rows, hashes: Hashes, source: str) -> None:
    """SourceError naming them and images of one. Ids of equal hashes are looked up, since others may have them too."""
    ordered = np.sort(hashes)
    repeated = pa.array(np.unique(ordered[1:][ordered[1:] == ordered[:-1]]))
    if not len(repeated):
        return
    uris = defaultdict[str, list[str]](list)
    for shard, table in enumerate(plan.shards(["id", "uri"])):
        first = shard * plan.samples_per_shard
        is_suspect = pc.is_in(pa.array(hashes[first : first + table.num_rows]), value_set=repeated)
        for sample in table.filter(is_suspect).to_pylist():
            if len(uris[sample["id"]]) < 2:
                uris[sample["id"]].append(sample["uri"] or "none")
    if names := sorted(name for name, images in uris.items() if len(images) > 1):
        raise SourceError(
            f"{source}: {counted(len(names), 'sample id')} came more than once: {abridged(names)} (first with "
            f"the images {abridged(uris[names[0]])}); give each sample an id of its own, or leave out all but one"
        )
