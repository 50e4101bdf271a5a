"""What a cache says of itself: its records, and the samples that it was planned with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from cache_store.cache.metadata import PartOnDisk
from cache_store.cache.survey import Survey
from cache_store.format.plan import is_cut_as
from cache_store.format.schema import Recipe, SizedArray, Spec, shard_runs

ArrayOf = Callable[[str], SizedArray]
"""Describes the array of a name."""


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
        """Whether all parts and their texts are on disk as they must be."""
        return self.spec is not None and not self.lost and not self.lost_texts

    @property
    def lost_texts(self) -> frozenset[int]:
        """Parts whose texts in force are not on disk."""
        return frozenset(range(self.num_parts)) - self.survey.texts.keys()

    @property
    def num_parts(self) -> int:
        return len(self.spec.parts) if self.spec else 0

    @cached_property
    def parts(self) -> dict[int, PartOnDisk]:
        """The parts of the spec that are on disk, by number."""
        found = {number: each.value for number, each in enumerate(self.survey.parts[: self.num_parts])}
        return {number: each for number, each in found.items() if each and number not in self.lost}


def stated_of(survey: Survey, recipe: Recipe, array_of: ArrayOf, *, mends: bool = False) -> Stated:
    """Find the samples that a cache of this recipe was planned with.

    The spec and the seal say which these are, the one whose parts are on disk first; or else all records do. For a
    repair of a sealed cache, parts in other files than the sealed ones are lost.
    """
    specs = [spec for spec in stated_specs(survey) if spec.recipe == recipe]
    on_disk = [each.value for each in survey.parts if each.value]
    if not specs and len(on_disk) == len(survey.parts) and fits_records(survey, on_disk):
        specs = [spec_of(recipe, on_disk, array_of)]
    if not specs:
        return Stated(survey=survey)
    spec = next((each for each in specs if not lost_parts(survey, each)), specs[0])
    lost = lost_parts(survey, spec)
    if mends and survey.seal.value:
        lost |= {number for number, each in enumerate(survey.parts) if each.value and not each.value.is_known}
    return Stated(survey=survey, spec=spec, lost=lost)


def stated_specs(survey: Survey) -> list[Spec]:
    """List the specs that the cache states: its own, and the sealed one."""
    return [spec for spec in (survey.spec.value, survey.seal.value and survey.seal.value.spec) if spec]


def spec_of(recipe: Recipe, parts: Sequence[PartOnDisk], array_of: ArrayOf) -> Spec:
    """Make the spec of a cache with these parts; arrays come in the order of their first rows."""
    sizes = [size for part in parts for size in part.sizes]
    runs = shard_runs((rows for part in parts for rows in part.lengths), sizes)
    return recipe.spec([each.digests.part for each in parts], runs, map(array_of, dict.fromkeys(sizes)))


def lost_parts(survey: Survey, spec: Spec) -> frozenset[int]:
    return frozenset(number for number in range(len(spec.parts)) if not has_part(survey, spec, number))


def has_part(survey: Survey, spec: Spec, number: int) -> bool:
    """Return whether a part is on disk, with the samples of the spec, cut as the spec says."""
    part = survey.parts[number].value if number < len(survey.parts) else None
    if part is None or part.digests.part != spec.parts[number]:
        return False
    return is_cut_as(spec, number, part.lengths, part.sizes)


def fits_records(survey: Survey, parts: Sequence[PartOnDisk]) -> bool:
    """Return whether every record was made for the samples of these parts."""
    contents = [record.content for record in survey.records.values()]
    shards = [digest for part in parts for digest in part.digests.shards]
    return bool(contents) and all(each.shard < len(shards) and each.samples == shards[each.shard] for each in contents)
