"""Read everything that a build has to know, once: the cache, the source's list, and how the two lists fit together.

Nothing is judged here: `decide` does that, without a disk. Images are compared later, by `images`, because the decision
says which ones.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cache_store.cache.survey import Survey, survey, survey_build, survey_without_reading_plan
from cache_store.format.array import ArraySpec
from cache_store.format.plan import PlanDigests
from cache_store.format.record import FORMAT_VERSION
from cache_store.format.schema import BuildRecord, Recipe
from cache_store.storage.store import Store
from precompute.config import BuildConfig
from precompute.rerun.order import NO_DIFFERENCE, PlanDifference, compare_plans, reorder_by_ids
from precompute.rerun.request import BuildRequest
from precompute.rerun.rows import NO_IDS, SHOWN_IDS, Rows, SomeIds, hashes_of, rows_on_disk
from precompute.rerun.source_plan import SourceList, list_source
from precompute.sources import Source

if TYPE_CHECKING:
    from precompute.encoders.encoder import Encoder  # with torch, which no decision needs


@dataclass(frozen=True, kw_only=True)
class BuildInputs:
    """One build's config and request, with its opened store, source and encoder."""

    config: BuildConfig
    request: BuildRequest
    store: Store
    source: Source
    encoder: "Encoder"

    @property
    def recipe(self) -> Recipe:
        return recipe_of(self.config, self.encoder)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The state of a cache on disk, and of the source that it is built from."""

    survey: Survey
    recipe: Recipe
    """The recipe that config and encoder ask for."""
    found: Rows | None
    """The source's samples, in the cache's rows as far as it has them; None if ranks find no whole plan."""
    planned: Rows | None = None
    """The samples that the cache was planned with; None for a new cache, and if they are lost."""
    is_continuation: bool = False
    """Whether `found` begins with all of `planned`."""
    difference: PlanDifference = NO_DIFFERENCE
    """How `found` differs from `planned`."""
    has_begun_to_grow: bool = False
    """Whether the plan file is already that of an extension, though the spec is not."""
    has_begun_whole: bool = False
    """Whether that extension's plan file has all samples of the source."""
    source_version: str | None = None
    """The source's version from before the listing; None if every build must list it."""
    skipped_note: str = ""
    """Note on the source's files that are not samples; empty if this run did not list the source."""
    free_bytes: int | None = None
    """Bytes free at the cache's place; None if unknown."""


def recipe_of(config: BuildConfig, encoder: "Encoder") -> Recipe:
    from precompute.encoders.encoder import TextEncoder  # with torch, which no decision needs

    array = ArraySpec(
        **msgspec.structs.asdict(encoder.layout(config.image.height, config.image.width)),
        dtype=config.store.dtype,
        codec=config.store.codec,
        image=None if isinstance(encoder, TextEncoder) else config.image.recipe,
        text=encoder.recipe if isinstance(encoder, TextEncoder) else None,
        encoder=encoder.identity,
    )
    return Recipe(
        format_version=FORMAT_VERSION,
        store_format=config.store.format,
        samples_per_shard=config.store.samples_per_shard,
        array=array,
    )


def read_facts(inputs: BuildInputs) -> Facts:
    """Read the cache, and list the source unless the cache's plan still is its list.

    Listing takes as long as planning, while that check only looks at each source file and each cache record.
    """
    config, store, version = inputs.config, inputs.store, inputs.source.version()
    build = survey_build(store)
    is_unchanged = not inputs.request.has_extra_work and is_source_unchanged(build.value, config, version)
    source_list = None if is_unchanged else list_source(inputs.source, config)
    surveyed = survey(store, known_plans(build.value, source_list), build)
    if is_unchanged and (rows := unchanged_rows(surveyed)):
        facts = compare_lists(surveyed, inputs.recipe, rows)
    else:
        listed = source_list or list_source(inputs.source, config)
        facts = replace(compare_lists(surveyed, inputs.recipe, listed.rows), skipped_note=listed.skipped_note)
        version = None if listed.num_missing else version  # each build checks again how many may be missing
    return replace(facts, source_version=version, free_bytes=store.free_bytes())


def read_planned_facts(inputs: BuildInputs, *, as_stated: bool = False) -> Facts:
    """Read the cache for ranks, or for the seal after them: the plan on disk counts, whatever the source has now.

    A rank takes the plan's rows `as_stated` by the records, and reads only those of its own shards.
    """
    return planned_facts((survey_without_reading_plan if as_stated else survey)(inputs.store), inputs.recipe)


def planned_facts(surveyed: Survey, recipe: Recipe) -> Facts:
    spec, plan = surveyed.spec.value, surveyed.plan.value
    if spec is None or plan is None or (plan.plan.num_rows, plan.digests.whole) != (spec.rows, spec.plan_digest):
        return Facts(survey=surveyed, recipe=recipe, found=None)
    return compare_lists(surveyed, recipe, rows_on_disk(plan.plan, spec.samples_per_shard, spec.rows, plan.digests))


def is_source_unchanged(build: BuildRecord | None, config: BuildConfig, source_version: str | None) -> bool:
    """Return whether the cache was planned with this config and no source file was written, added or removed since."""
    listed = build and build.listed
    return bool(build and listed and listed.source == source_version and build.config == config.recorded())


def known_plans(build: BuildRecord | None, source_list: SourceList | None) -> dict[str, PlanDigests]:
    """Digests of rows that this run listed, or else an earlier one, by the SHA-256 of the plan file that has them."""
    if source_list is not None:
        return source_list.rows.known_plan
    listed = build and build.listed
    return {listed.plan_sha256: PlanDigests(listed.plan_digest, listed.shard_digests)} if listed else {}


def unchanged_rows(surveyed: Survey) -> Rows | None:
    """Return the plan's rows; None if plan, spec or seal is lost, damaged or replaced since the source was listed."""
    spec, plan, seal, build = surveyed.spec.value, surveyed.plan.value, surveyed.seal.value, surveyed.build.value
    if spec is None or plan is None or build is None or (listed := build.listed) is None:
        return None
    if (plan.file.sha256, spec.plan_digest) != (listed.plan_sha256, listed.plan_digest):
        return None
    if (seal and seal.plan_file != plan.file) or not has_recipe(surveyed, spec.recipe):
        return None
    return rows_on_disk(plan.plan, spec.samples_per_shard, spec.rows, plan.digests)


def compare_lists(surveyed: Survey, recipe: Recipe, found: Rows) -> Facts:
    """Find the samples that the cache was planned with, and put the source's samples into its rows.

    A cache of another recipe is refused anyway, so its lists are not compared.
    """
    facts = Facts(survey=surveyed, recipe=recipe, found=found)
    if not surveyed.has_cache or not has_recipe(surveyed, recipe):
        return facts
    planned, restored = planned_rows(surveyed, recipe, found)
    if planned is None:
        gone = sorted({*surveyed.ids.values()}.difference(restored.ids()))
        return replace(facts, found=restored, difference=PlanDifference(removed=SomeIds(len(gone), gone[:SHOWN_IDS])))
    in_rows = found if found.begins_with(planned) else reorder_by_ids(found, planned.id_hashes())
    if not in_rows.begins_with(planned):
        return replace(facts, planned=planned, difference=compare_plans(planned, found))
    is_longer = len(in_rows) > len(planned)
    added = in_rows.ids_where(np.arange(len(in_rows)) >= len(planned)) if is_longer else NO_IDS
    file = surveyed.plan.value.plan if surveyed.plan.value and planned.is_on_disk else planned.plan
    has_begun = planned.is_on_disk and file.num_rows > len(planned)
    return replace(
        facts,
        found=in_rows,
        planned=planned,
        is_continuation=True,
        difference=PlanDifference(added=added),
        has_begun_to_grow=has_begun,
        has_begun_whole=has_begun and is_longer and file.digests() == in_rows.digests,
    )


def has_recipe(surveyed: Survey, recipe: Recipe) -> bool:
    """Return whether the cache was made with this recipe, by all its records, or else its spec, or else its seal."""
    held = [record.content.recipe for record in surveyed.records.values()]
    stated = [each.value.recipe for each in (surveyed.spec, surveyed.seal) if each.value]
    return all(each == recipe for each in held) if held else stated[:1] == [recipe]


def planned_rows(surveyed: Survey, recipe: Recipe, found: Rows) -> tuple[Rows | None, Rows]:
    """Find the rows that the cache was planned with, by what the spec, the seal or else the records were made for.

    The plan file lists them, and the source is its backup; None if neither can have had them. The second result is what
    the source has of them.
    """
    spec, plan, seal, size = surveyed.spec.value, surveyed.plan.value, surveyed.seal.value, recipe.samples_per_shard
    spec = spec if spec and spec.recipe == recipe else None
    plan = plan if plan and plan.plan.has_shards_of(size) else None
    if spec and plan and plan.digests.whole == spec.plan_digest:
        return rows_on_disk(plan.plan, size, spec.rows, plan.digests), found
    restored = source_in_rows(surveyed, spec.rows if spec else count_planned(surveyed, size), found)
    candidates = [restored]
    if plan:
        candidates.insert(0, rows_on_disk(plan.plan, size, plan.plan.num_rows, plan.plan.digests()))
    stated = {each for each in (spec and spec.digest, seal and seal.spec_digest) if each}
    fitting = [rows for rows in candidates if rows.spec(recipe).digest in stated]
    fitting += [rows for rows in candidates if fits_records(surveyed, recipe, rows)]
    return next(iter(fitting), None), restored


def fits_records(surveyed: Survey, recipe: Recipe, rows: Rows) -> bool:
    """Return whether every record of a shard with as many samples was made for them; a growing shard has more."""
    spec = rows.spec(recipe)
    contents = [record.content for shard, record in surveyed.records.items() if shard < spec.num_shards]
    full = [each for each in contents if each.cached + each.rejected == len(spec.shard_rows(each.shard))]
    return bool(full) and all(each.plan_digest == rows.digests.shards[each.shard] for each in full)


def source_in_rows(surveyed: Survey, num_planned: int, found: Rows) -> Rows:
    """Put the source's samples in the rows that samples tables state, as many as the cache was planned with.

    Rows that no table states go to the remaining samples, in order; a digest decides whether that was right.
    """
    rows = min(num_planned or len(found), len(found))
    known = [surveyed.ids.get(row) for row in range(rows)]
    taken = set(known)
    left = (name for name in found.ids() if name not in taken)
    named = [name if name is not None else next(left, None) for name in known]
    return reorder_by_ids(found, hashes_of(name for name in named if name is not None)).first(rows)


def count_planned(surveyed: Survey, samples_per_shard: int) -> int:
    """Count rows up to the last that a record or samples table knows."""
    contents = ((shard, record.content) for shard, record in surveyed.records.items())
    ends = (shard * samples_per_shard + each.cached + each.rejected for shard, each in contents)
    return max([0, *ends, *(row + 1 for row in surveyed.ids)])
