"""What a cache says of itself: its records, and the samples that it was planned with, on disk or found again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import pyarrow as pa

from cache_store.cache.metadata import PartOnDisk, open_plan
from cache_store.cache.survey import Survey
from cache_store.format.array import Size
from cache_store.format.plan import PartDigests, PartHash, is_cut_as
from cache_store.format.schema import Recipe, SizedArray, Spec, shard_runs
from cache_store.storage.store import Store


@dataclass(frozen=True, kw_only=True)
class Stated:
    """The state of a cache on disk; that of a new cache is empty."""

    survey: Survey
    spec: Spec | None = None
    """The recipe and the samples that the cache was planned with; None for a new cache, and if no file tells."""
    lost: frozenset[int] = frozenset()
    """Parts that are not on disk as the spec has them."""

    @property
    def is_whole(self) -> bool:
        return self.spec is not None and not self.lost and not self.lost_texts

    @property
    def lost_texts(self) -> frozenset[int]:
        return frozenset(range(self.num_parts)) - self.survey.texts.keys()

    @property
    def num_parts(self) -> int:
        return len(self.spec.parts) if self.spec else 0

    @cached_property
    def parts(self) -> dict[int, PartOnDisk]:
        found = {number: each.value for number, each in enumerate(self.survey.parts[: self.num_parts])}
        return {number: each for number, each in found.items() if each and number not in self.lost}


def stated_of(survey: Survey, recipe: Recipe, array_of: Callable[[Size], SizedArray]) -> Stated:
    """Find the samples that a cache of this recipe was planned with.

    The spec and the seal say which these are, the one whose parts are on disk first; without both, all parts that are
    on disk, if every record has samples of theirs. In a sealed cache, parts in files that are neither sealed nor
    listed are lost.
    """
    specs = [spec for spec in survey.specs if spec.recipe == recipe]
    on_disk = [each.value for each in survey.parts if each.value]
    samples = [digest for part in on_disk for digest in part.digests.shards]
    fits = all(samples[shard : shard + 1] == [each.content.samples] for shard, each in survey.records.items())
    if not specs and survey.records and fits and len(on_disk) == len(survey.parts):
        specs = [spec_of(recipe, on_disk, array_of)]
    if not specs:
        return Stated(survey=survey)
    lost, spec = min(((lost_parts(survey, each), each) for each in specs), key=lambda each: bool(each[0]))
    if survey.seal.value:
        lost |= {number for number, each in enumerate(survey.parts) if each.value and not each.value.is_known}
    return Stated(survey=survey, spec=spec, lost=lost)


def spec_of(recipe: Recipe, parts: Sequence[PartOnDisk], array_of: Callable[[Size], SizedArray]) -> Spec:
    sizes = [size for part in parts for size in part.sizes]
    runs = shard_runs((rows for part in parts for rows in part.lengths), sizes)
    return recipe.spec(
        [each.digests.part for each in parts], runs, map(array_of, map(Size.of_name, dict.fromkeys(sizes)))
    )


def lost_parts(survey: Survey, spec: Spec) -> frozenset[int]:
    """Return the parts that are not on disk with the samples of the spec, cut as it says."""
    on_disk = {number: each.value for number, each in enumerate(survey.parts) if each.value}
    return frozenset(
        number
        for number, part in enumerate(spec.parts)
        if (held := on_disk.get(number)) is None
        or held.digests.part != part
        or not is_cut_as(spec, number, held.lengths, held.sizes)
    )


NOTHING: Mapping[int, pa.Table] = MappingProxyType({})


class Planned:
    """Reads the rows of shards as the source has them now."""

    def __init__(
        self,
        store: Store,
        spec: Spec,
        stated: Stated,
        found: Mapping[int, pa.Table] = NOTHING,
        added: Sequence[PartOnDisk] = (),
    ) -> None:
        """`found` has the rows of parts that have to be written, among them those that are lost."""
        self.found, self.spec, self._plan, self._lost = found, spec, open_plan(store, spec), stated.lost
        parts = {**stated.parts, **dict(enumerate(added, start=stated.num_parts))}
        self._known = {number: each.digests for number, each in parts.items()}

    def of_shard(self, shard: int, columns: Sequence[str]) -> pa.Table:
        part = int(self.spec.part_of_shard[shard])
        rows = self.found.get(part)
        if rows is None or not {*columns} <= {*rows.column_names}:
            return self._plan.shard(shard, columns)
        return self._shard_of(rows, part, shard).select(columns)

    def fingerprints_before(self, shard: int) -> pa.ChunkedArray | None:
        if int(self.spec.part_of_shard[shard]) in self._lost:
            return None
        return self._plan.shard(shard, ["fingerprint"])["fingerprint"]

    def shards(self, part: int) -> list[pa.Table]:
        return [self._shard_of(self.found[part], part, shard) for shard in self.spec.part_shards[part]]

    def texts_of(self, shard: int) -> pa.Table:
        return self.of_shard(shard, ["id", "conversations"])

    def facts_of(self, shard: int) -> tuple[str, int]:
        part = int(self.spec.part_of_shard[shard])
        digests, place = self._digests(part), shard - self.spec.part_shards[part].start
        return digests.shards[place], digests.withdrawn[place]

    def _digests(self, part: int) -> PartDigests:
        if part in self._known:
            return self._known[part]
        if part not in self._lost:
            return self._known.setdefault(part, self._plan.part(part).stated_digests)
        part_hash = PartHash()
        for rows in self.shards(part):
            part_hash.add(rows)
        return self._known.setdefault(part, part_hash.digests())

    def _shard_of(self, rows: pa.Table, part: int, shard: int) -> pa.Table:
        first = int(self.spec.bounds[self.spec.part_shards[part].start])
        own = self.spec.shard_rows(shard)
        return rows.slice(own.start - first, len(own))
