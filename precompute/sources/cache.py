"""Samples of another cache's plan, in the same rows, with images from that cache's source.

So a second encoder, another size or a flipped view becomes a new cache that joins the first one row by row.
"""

from collections.abc import Iterator, Sequence

from cache_store.cache.metadata import open_plan, read_spec
from cache_store.errors import SourceError
from cache_store.format.layout import PLAN, TEXTS_FILE, part_file
from cache_store.format.plan import Plan
from cache_store.format.tables import CLIP_START, WITHDRAWN
from cache_store.storage.store import Store
from precompute.sources.images import ALL, Images, ImagesOf, Names, Source
from precompute.sources.listing import Samples

GONE: dict[str, object] = {"fingerprint": None, "place": None, "state": WITHDRAWN}
"""The columns of a sample that was withdrawn from the other cache: its image is not looked for."""

ROWS_AT_ONCE = 4_096


class CacheSource(ImagesOf, Source):
    """The plan of a cache, sealed or not; `images` come from the cache's own source."""

    def __init__(self, store: Store, images: Images) -> None:
        super().__init__(images)
        self._store = store

    def version(self, part: Names = ALL) -> None:
        """Return None: only a listing shows that the plan is sound."""

    def parts(self, rows: int) -> Sequence[Names]:
        """Return the parts of the other cache, so that this one has the same."""
        return [(str(part),) for part in range(len(read_spec(self._store).parts))]

    def list_version(self) -> str:
        """Return what a new caption or a withdrawal changes."""
        names = [TEXTS_FILE, *(part_file(part) for part in range(len(read_spec(self._store).parts)))]
        return repr([self._store.stat(name).stamp for name in names])

    def samples(self, part: Names = ALL) -> Samples:
        """List the plan's rows; raise SourceError if the plan is not the one of the cache's spec."""
        spec = read_spec(self._store)
        plan, parts = open_plan(self._store, spec), [int(part[0])] if part else range(len(spec.parts))
        if any(plan.part(number).computed_digests().part != spec.parts[number] for number in parts):
            where = self._store.where(PLAN)
            raise SourceError(f"source.path: {where} is damaged; run `precompute repair` for that cache")
        starts = (plan.part(number).whole([CLIP_START])[CLIP_START] for number in parts)
        extra = [*plan.extra, *([CLIP_START] if any(each.null_count < len(each) for each in starts) else [])]
        return Samples(self._samples(plan, parts, extra), extra=extra)

    def _samples(self, plan: Plan, parts: Sequence[int], extra: list[str]) -> Iterator[dict[str, object]]:
        names = ["id", "uri", "state", "conversations", *extra]
        for part in parts:
            for batch in plan.part_rows(part, names).to_batches(ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    yield {
                        **{name: row[name] for name in ("id", "uri", "conversations")},
                        "extra": {name: row[name] for name in extra},
                        **(GONE if row["state"] == WITHDRAWN else self.locate(row["uri"]).columns()),
                    }
