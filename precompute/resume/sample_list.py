"""Which samples a cache was planned with, and how the source's lie in its rows.

The plan file says which, and the source is its backup. Right is the list that the spec, the seal or else the records
were made for.
"""

from dataclasses import dataclass

import pyarrow as pa

from cache_store.cache.survey import Survey
from cache_store.format.plan import DIGESTED, PlanDigests, plan_digests
from cache_store.format.schema import Recipe, Spec
from precompute.plan import compare_plans, in_order_of
from precompute.resume.refusals import refuse_grown_list, refuse_lost_list, refuse_other_list
from precompute.resume.request import BuildRequest


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Samples in the order of a cache's rows."""

    table: pa.Table
    digests: PlanDigests
    on_disk: bool = False
    """As the plan file has them; else as the source has them."""

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def spec(self, recipe: Recipe) -> Spec:
        """Of a cache of that recipe with these rows."""
        return recipe.spec(len(self), self.digests.whole)


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


def arrange(survey: Survey, recipe: Recipe, found: pa.Table, request: BuildRequest) -> SampleList:
    """Bring the samples `found` into the cache's rows; StaleError where it has others or lacks some."""
    planned = planned_rows(survey, recipe, found)
    plan = in_order_of(found, planned.table["id"])
    if not same_samples(planned.table, plan.slice(0, len(planned))):
        refuse_other_list(survey.store, len(planned), found.num_rows, compare_plans(planned.table, found), request)
    on_disk = survey.plan.value.table if survey.plan.value and planned.on_disk else None
    has_begun = on_disk is not None and on_disk.num_rows > len(planned)
    new = plan["id"].slice(len(planned)).to_pylist()
    if new and request.new_samples != "append" and not (has_begun and same_samples(on_disk, plan)):
        if request.new_samples == "refuse":
            refuse_grown_list(survey.store, len(planned), new, request)
        plan = plan.slice(0, len(planned))
    grows = plan.num_rows > len(planned)
    digests = plan_digests(plan, recipe.samples_per_shard) if grows else planned.digests
    return SampleList(
        planned=planned,
        wanted=Rows(table=plan, digests=digests),
        left_out=0 if grows else len(new),
        has_begun_to_grow=has_begun,
    )


def same_samples(left: pa.Table, right: pa.Table) -> bool:
    """Compare the digested columns, which takes no time."""
    return bool(left.select(DIGESTED).equals(right.select(DIGESTED)))


def planned_rows(survey: Survey, recipe: Recipe, found: pa.Table) -> Rows:
    """Find what the cache was planned with; StaleError where neither the plan file nor the source can have been it."""
    plan, spec = survey.plan.value, sound_spec(survey, recipe)
    if spec and plan and plan.digests and plan.digests.whole == spec.plan_digest:
        return Rows(table=plan.table.slice(0, spec.rows), digests=plan.digests, on_disk=True)
    source = source_in_rows(survey, recipe, found)
    tables = [(plan.table, True), (source, False)] if plan else [(source, False)]
    candidates = [
        Rows(table=table, digests=plan_digests(table, recipe.samples_per_shard), on_disk=on_disk)
        for table, on_disk in tables
    ]
    fitting = (rows for fits in (is_stated, fits_records) for rows in candidates if fits(survey, recipe, rows))
    if (rows := next(fitting, None)) is None:
        refuse_lost_list(survey, source, candidates[-1].digests)
    return rows


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


def source_in_rows(survey: Survey, recipe: Recipe, found: pa.Table) -> pa.Table:
    """Put the source's samples in the rows that samples tables say, as many as the cache was planned with.

    Rows that no table speaks of go to the samples left over, in order; a digest decides whether that was right.
    """
    rows = min(planned_count(survey, recipe) or found.num_rows, found.num_rows)
    known = [survey.ids.get(row) for row in range(rows)]
    taken = set(known)
    left = (name for name in found["id"].to_pylist() if name not in taken)
    ids = [name if name is not None else next(left, None) for name in known]
    return in_order_of(found, pa.chunked_array([ids], pa.string())).slice(0, rows)


def planned_count(survey: Survey, recipe: Recipe) -> int:
    """Count rows by the spec, or else up to the last that a record or samples table knows."""
    if spec := sound_spec(survey, recipe):
        return spec.rows
    ends = (
        shard * recipe.samples_per_shard + record.content.cached + record.content.rejected
        for shard, record in survey.records.items()
    )
    return max([0, *ends, *(row + 1 for row in survey.ids)])
