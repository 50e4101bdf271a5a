"""Which samples a cache was planned with, and how the source's lie in its rows.

The plan file says which, and the source is its backup. Right is the list that the spec, the seal or else the records
were made for.
"""

from dataclasses import dataclass, replace

import numpy as np

from cache_store.cache.survey import PlanOnDisk, Survey
from cache_store.format.schema import Recipe, Spec
from precompute.plan.differences import compare_plans
from precompute.plan.ids import hashes_of
from precompute.plan.order import in_order_of
from precompute.plan.rows import Rows, rows_on_disk
from precompute.resume.refusals import refuse_grown_list, refuse_lost_list, refuse_other_list
from precompute.resume.request import BuildRequest


@dataclass(frozen=True, kw_only=True)
class SampleList:
    """What a cache holds and is to hold."""

    planned: Rows
    """What the cache was planned with."""
    wanted: Rows
    """All that it is to hold, as the source has it: the samples planned before, then the new ones."""
    left_out: int
    """Samples of the source that are new and not asked for."""
    has_begun_to_grow: bool
    """The plan file is already that of an extension, though the spec is not."""


def arrange(survey: Survey, recipe: Recipe, found: Rows, request: BuildRequest) -> SampleList:
    """Bring the samples `found` into the cache's rows; StaleError where it has others or lacks some."""
    planned = planned_rows(survey, recipe, found)
    plan = found if found.begins_with(planned) else in_order_of(found, planned.id_hashes())
    if not plan.begins_with(planned):
        refuse_other_list(survey.store, len(planned), len(found), compare_plans(planned, found), request)
    held = survey.plan.value.plan if survey.plan.value and planned.on_disk else planned.plan
    has_begun = planned.on_disk and held.num_rows > len(planned)
    new = len(plan) - len(planned)
    if new and request.new_samples != "append" and not (has_begun and held.digests() == plan.digests):
        if request.new_samples == "refuse":
            is_new = np.arange(len(plan)) >= len(planned)
            refuse_grown_list(survey.store, len(planned), plan.ids_where(is_new), request)
        plan = replace(plan, count=len(planned), digests=planned.digests, file_sha256=None)
    grows = len(plan) > len(planned)
    return SampleList(planned=planned, wanted=plan, left_out=0 if grows else new, has_begun_to_grow=has_begun)


def planned_rows(survey: Survey, recipe: Recipe, found: Rows) -> Rows:
    """Find what the cache was planned with; StaleError where neither the plan file nor the source can have been it."""
    plan, spec, size = usable_plan(survey, recipe), sound_spec(survey, recipe), recipe.samples_per_shard
    if spec and plan and plan.digests.whole == spec.plan_digest:
        return rows_on_disk(plan.plan, size, spec.rows, plan.digests)
    source = source_in_rows(survey, recipe, found)
    candidates = [source]
    if plan:
        candidates.insert(0, rows_on_disk(plan.plan, size, plan.plan.num_rows, plan.plan.digests()))
    fitting = (rows for fits in (is_stated, fits_records) for rows in candidates if fits(survey, recipe, rows))
    if (rows := next(fitting, None)) is None:
        refuse_lost_list(survey, source)
    return rows


def usable_plan(survey: Survey, recipe: Recipe) -> PlanOnDisk | None:
    """Return the plan file's plan, unless its row groups are no shards of the recipe."""
    plan = survey.plan.value
    return plan if plan and plan.plan.has_shards_of(recipe.samples_per_shard) else None


def sound_spec(survey: Survey, recipe: Recipe) -> Spec | None:
    """Return the spec of the spec file, unless it is of another recipe than the records."""
    spec = survey.spec.value
    return spec if spec and spec.recipe == recipe else None


def is_stated(survey: Survey, recipe: Recipe, rows: Rows) -> bool:
    """Whether these are the rows of the spec, or of the seal."""
    spec, seal = rows.spec(recipe), survey.seal.value
    return spec == sound_spec(survey, recipe) or (seal is not None and seal.spec_digest == spec.digest)


def fits_records(survey: Survey, recipe: Recipe, rows: Rows) -> bool:
    """Whether every record of as many samples as its shard would have was made for those; a growing shard has more."""
    spec = rows.spec(recipe)
    contents = [record.content for shard, record in survey.records.items() if shard < spec.num_shards]
    full = [each for each in contents if each.cached + each.rejected == len(spec.shard_rows(each.shard))]
    return bool(full) and all(each.plan_digest == rows.digests.shards[each.shard] for each in full)


def source_in_rows(survey: Survey, recipe: Recipe, found: Rows) -> Rows:
    """Put the source's samples in the rows that samples tables say, as many as the cache was planned with.

    Rows that no table speaks of go to the samples left over, in order; a digest decides whether that was right.
    """
    rows = min(planned_count(survey, recipe) or len(found), len(found))
    known = [survey.ids.get(row) for row in range(rows)]
    taken = set(known)
    left = (name for table in found.shards(["id"]) for name in table["id"].to_pylist() if name not in taken)
    named = [name if name is not None else next(left, None) for name in known]
    return in_order_of(found, hashes_of(name for name in named if name is not None)).first(rows)


def planned_count(survey: Survey, recipe: Recipe) -> int:
    """Count rows by the spec, or else up to the last that a record or samples table knows."""
    if spec := sound_spec(survey, recipe):
        return spec.rows
    ends = (
        shard * recipe.samples_per_shard + record.content.cached + record.content.rejected
        for shard, record in survey.records.items()
    )
    return max([0, *ends, *(row + 1 for row in survey.ids)])
