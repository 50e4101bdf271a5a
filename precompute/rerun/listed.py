"""Whether a cache's plan still is the list of its source. Where it is, a build goes on by it and lists nothing: listing
takes as long as planning, while this takes a look at each file of the source and each record of the cache.
"""

from cache_store.cache.survey import Survey, held_recipe
from cache_store.format.plan import PlanDigests
from cache_store.format.schema import BuildRecord, FileRecord, Listed, Recipe
from precompute.config import BuildConfig
from precompute.rerun.decide import Wanted, Work
from precompute.rerun.rows import rows_on_disk


def is_source_unchanged(build: BuildRecord, config: BuildConfig, source_version: str | None) -> bool:
    """Whether the cache was planned by this config, and no file of the source was written, added or taken away."""
    listed = build.listed
    return listed is not None and listed.source == source_version and build.config == config.recorded()


def known_plan(listed: Listed) -> dict[str, PlanDigests]:
    """The digests of the rows that were listed, by the SHA-256 of the plan's file."""
    return {listed.plan_sha256: PlanDigests(listed.plan_digest, listed.shard_digests)}


def wanted_by_plan(survey: Survey, build: BuildRecord, recipe: Recipe) -> Wanted | None:
    """The plan's rows; None where plan, spec or seal were lost, damaged or replaced, or `build` is not the record that
    lies there now.
    """
    spec, plan, seal, listed = survey.spec.value, survey.plan.value, survey.seal.value, build.listed
    if spec is None or plan is None or listed is None or survey.build.value != build:
        return None
    if (plan.file.sha256, spec.plan_digest) != (listed.plan_sha256, listed.plan_digest):
        return None
    if (seal and seal.plan_file != plan.file) or spec.recipe != held_recipe(survey):
        return None
    rows = rows_on_disk(plan.plan, spec.samples_per_shard, spec.rows, plan.digests)
    return Wanted(samples=rows, recipe=recipe, source_version=listed.source)


def listed_by(work: Work, plan_file: FileRecord) -> Listed | None:
    """What to keep of the list, once the plan of it is on disk; None where the source has to be listed each time."""
    if work.source_version is None or work.plan is None:
        return None
    digests = work.plan.digests
    return Listed(
        source=work.source_version,
        plan_sha256=plan_file.sha256,
        plan_digest=digests.whole,
        shard_digests=digests.shards,
    )
