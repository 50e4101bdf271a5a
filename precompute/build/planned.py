"""The samples of a planned cache: those on disk, and in place of lost and moved parts, those that were found."""

from collections.abc import Mapping, Sequence, Set

import pyarrow as pa

from cache_store.cache.metadata import open_plan
from cache_store.format.plan import PartDigests, PartHash
from cache_store.format.schema import Spec
from cache_store.storage.store import Store
from precompute.build.stated import Stated


class Planned:
    """Reads the rows of shards as the source has them now."""

    def __init__(self, store: Store, spec: Spec, found: Mapping[int, pa.Table], lost: Set[int]) -> None:
        """`found` has the rows of parts that have to be written, among them those that are `lost`."""
        self.found, self.spec, self._plan, self._lost = found, spec, open_plan(store, spec), lost

    def of_shard(self, shard: int, columns: Sequence[str]) -> pa.Table:
        part = int(self.spec.part_of_shard[shard])
        rows = self.found.get(part)
        if rows is None or not {*columns} <= {*rows.column_names}:
            return self._plan.shard(shard, columns)
        return self._shard_of(rows, part, shard).select(columns)

    def fingerprints_before(self, shard: int) -> pa.ChunkedArray | None:
        """Return the planned fingerprints; None if they are lost."""
        if int(self.spec.part_of_shard[shard]) in self._lost:
            return None
        return self._plan.shard(shard, ["fingerprint"])["fingerprint"]

    def shards(self, part: int) -> list[pa.Table]:
        """Return the rows of each shard of a part that was found."""
        return [self._shard_of(self.found[part], part, shard) for shard in self.spec.part_shards[part]]

    def texts_of(self, shard: int) -> pa.Table:
        return self.of_shard(shard, ["id", "conversations"])

    def digests(self, stated: Stated) -> list[PartDigests]:
        """Return the digests of the stated parts."""
        parts = {number: each.digests for number, each in stated.parts.items()}
        return [parts.get(number) or self._digests(number) for number in range(stated.num_parts)]

    def _digests(self, part: int) -> PartDigests:
        part_hash = PartHash()
        for rows in self.shards(part):
            part_hash.add(rows)
        return part_hash.digests()

    def _shard_of(self, rows: pa.Table, part: int, shard: int) -> pa.Table:
        first = int(self.spec.bounds[self.spec.part_shards[part].start])
        own = self.spec.shard_rows(shard)
        return rows.slice(own.start - first, len(own))
