"""Samples of another cache's plan, in its rows, with their images from where its build had them.

So a second encoder, another size or a flipped view of the same images becomes a cache that joins the first by row.
"""

from cache_store.cache.metadata import open_plan, read_spec
from cache_store.errors import SourceError
from cache_store.format.layout import PLAN_FILE
from cache_store.storage.store import Store
from precompute.sources.archives.image_store import Images, expecting
from precompute.sources.archives.names import Samples

ROWS_AT_ONCE = 4_096
"""As Python objects."""


class CacheSource:
    """The plan of a cache, sealed or not; `images` are those of the source that it was built from."""

    def __init__(self, store: Store, images: Images) -> None:
        self._store = store
        self.fingerprint, self.read, self.expect = images.fingerprint, images.read, expecting(images)

    def version(self) -> None:
        """Its plan would have to be read to know that it is sound, as when it is listed."""

    def samples(self) -> Samples:
        """In the rows of the plan; SourceError where the plan is not the one that the cache was made for."""
        plan = open_plan(self._store)
        if plan.digests().whole != read_spec(self._store).plan_digest:
            raise SourceError(
                f"source.path: {self._store.where(PLAN_FILE)} is damaged, or an extension of that cache "
                "has not finished; run the `precompute build` of that cache again"
            )
        shards = (plan.shard(shard, ["id", "uri", "conversations"]) for shard in range(plan.num_shards))
        rows = (row for shard in shards for batch in shard.to_batches(ROWS_AT_ONCE) for row in batch.to_pylist())
        each = ({**row, "fingerprint": self.fingerprint(row["uri"])} for row in rows)
        return Samples(each, in_rows=True)
