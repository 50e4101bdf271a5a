"""Samples of another cache's plan, in the same rows, with images from that cache's source.

So a second encoder, another size or a flipped view becomes a new cache that joins the first one row by row.
"""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from cache_store.cache.metadata import open_plan, read_spec
from cache_store.errors import SourceError
from cache_store.format.layout import PLAN
from cache_store.format.plan import Plan
from cache_store.format.tables import CLIP_START, WITHDRAWN
from cache_store.storage.store import Store
from precompute.sources.images import Images, ImagesOf, Source
from precompute.sources.listing import Samples

GONE: dict[str, object] = {"fingerprint": None, "place": None, "state": WITHDRAWN}
"""The columns of a sample that was withdrawn from the other cache: its image is not looked for."""

ROWS_AT_ONCE = 4_096
"""Rows held as Python objects at a time."""


class CacheSource(ImagesOf, Source):
    """The plan of a cache, sealed or not; `images` come from the cache's own source."""

    def __init__(self, store: Store, images: Images) -> None:
        super().__init__(images)
        self._store = store

    def version(self) -> None:
        """Return None: only reading the whole plan, as a listing does, shows that it is sound."""

    def samples(self) -> Samples:
        """List the samples in the plan's rows; raise SourceError if the plan is not the one of the cache's spec."""
        spec = read_spec(self._store)
        plan = open_plan(self._store, spec)
        if plan.digests().parts != spec.parts:
            raise SourceError(
                f"source.path: {self._store.where(PLAN)} is damaged; run the `precompute build` of that cache again"
            )
        has_starts = any(shard[CLIP_START].null_count < shard.num_rows for shard in shards_of(plan, [CLIP_START]))
        extra = [*plan.extra, *([CLIP_START] if has_starts else [])]
        names = ["id", "uri", "state", "conversations", *extra]
        rows = (
            row
            for shard in shards_of(plan, names)
            for batch in shard.to_batches(ROWS_AT_ONCE)
            for row in batch.to_pylist()
        )
        each = (
            {
                **{name: row[name] for name in ("id", "uri", "conversations")},
                "extra": {name: row[name] for name in extra},
                **(GONE if row["state"] == WITHDRAWN else self.locate(row["uri"]).columns()),
            }
            for row in rows
        )
        return Samples(each, in_rows=True, extra=extra, parts=[part.rows for part in spec.parts])


def shards_of(plan: Plan, columns: Sequence[str]) -> Iterator[pa.Table]:
    return (plan.shard(shard, columns) for shard in range(plan.num_shards))
