"""Samples of another cache's plan, in its rows, with their images from where its build had them.

So a second encoder, another size or a flipped view of the same images becomes a cache that joins the first by row.
"""

from cache_store.cache.files import read_plan
from cache_store.cache.metadata import read_spec
from cache_store.errors import SourceError
from cache_store.format.names import PLAN_FILE
from cache_store.format.plan import plan_digest
from cache_store.storage.store import Store
from precompute.sources.archives.image_store import Images
from precompute.sources.archives.listing import Samples


class CacheSource:
    """The plan of a cache, sealed or not; `images` are those of the source that it was built from."""

    def __init__(self, store: Store, images: Images) -> None:
        self._store = store
        self.fingerprint, self.read = images.fingerprint, images.read

    def samples(self) -> Samples:
        """In the rows of the plan; SourceError where the plan is not the one that the cache was made for."""
        plan = read_plan(self._store)
        if plan_digest(plan) != read_spec(self._store).plan_digest:
            raise SourceError(
                f"source.path: {self._store.where(PLAN_FILE)} is damaged, or an extension of that cache "
                "has not finished; run the `precompute build` of that cache again"
            )
        rows = (row for batch in plan.to_batches() for row in batch.drop_columns(["row"]).to_pylist())
        each = ({**row, "fingerprint": self.fingerprint(row["uri"])} for row in rows)
        return Samples(each, in_rows=True)
