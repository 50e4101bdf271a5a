"""Samples of another cache's plan, in the same rows, with images from that cache's source.

So a second encoder, another size or a flipped view becomes a new cache that joins the first one row by row.
"""

from cache_store.cache.metadata import open_plan, read_spec
from cache_store.errors import SourceError
from cache_store.format.layout import PLAN_FILE
from cache_store.storage.store import Store
from precompute.sources.images import Images, ImagesOf, Source
from precompute.sources.listing import Samples

WITHDRAWN: dict[str, object] = {"fingerprint": None, "place": None}
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
        plan = open_plan(self._store)
        if plan.digests().whole != read_spec(self._store).plan_digest:
            raise SourceError(
                f"source.path: {self._store.where(PLAN_FILE)} is damaged, or an extension of that cache "
                "has not finished; run the `precompute build` of that cache again"
            )
        shards = (plan.shard(shard, plan.digested) for shard in range(plan.num_shards))
        rows = (row for shard in shards for batch in shard.to_batches(ROWS_AT_ONCE) for row in batch.to_pylist())
        each = (
            {
                **{name: row[name] for name in ("id", "uri", "conversations")},
                "extra": {name: row[name] for name in plan.extra},
                **(WITHDRAWN if row["conversations"] is None else self.locate(row["uri"]).columns()),
            }
            for row in rows
        )
        return Samples(each, in_rows=True, extra=plan.extra)
