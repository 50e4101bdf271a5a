"""Sorting samples that are more than memory holds: runs of them by Arrow, in a file, then all runs together.

Of every sample only the id is in memory, to know its place among all. Since each run is sorted, neighbours in the whole
order are neighbours in every run, and few pages are read more than once.
"""

from collections.abc import Iterator
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from precompute.rerun.order import reordered
from precompute.rerun.rows import numbered, plan_in_scratch, slices_of, table_of

RUN_ROWS = 2**17
"""Sorted at a time, and put together at a time: 100 MB where a sample's texts are 250 bytes."""

PAGE_ROWS = 2**10
"""Read at a time; ten million samples are 77 runs, of which each block of the whole order needs two pages."""


def sorted_by_id(samples: Iterator[dict[str, object]], samples_per_shard: int) -> Iterator[pa.Table]:
    """Shards of all samples."""
    ids = list[pa.Array]()

    def pages() -> Iterator[pa.Table]:
        while (run := table_of(islice(samples, RUN_ROWS)).sort_by("id").combine_chunks()).num_rows:
            ids.extend(run["id"].cast(pa.large_string()).chunks)
            yield from slices_of(run, PAGE_ROWS)
            del run  # before the next one is made

    runs, _ = plan_in_scratch(numbered(pages()))
    order = pc.sort_indices(pa.chunked_array(ids, pa.large_string())).to_numpy()
    ids.clear()
    return reordered(runs, PAGE_ROWS, order, samples_per_shard, RUN_ROWS)
