"""Whether a cache's plan still is the list of its source, so that nothing is listed again to go on: that takes as long
as planning, while this takes a look at each file of the source and each record of the cache.
"""

from cache_store.cache.survey import Survey
from cache_store.format.schema import BuildRecord, FileRecord, Listed, Recipe
from precompute.config import BuildConfig
from precompute.plan.rows import rows_on_disk
from precompute.resume.decide import Wanted, Work
from precompute.sources import Source


def is_as_listed(build: BuildRecord, config: BuildConfig, source: Source) -> bool:
    """Whether a plan was made of this very source, and nothing there was written, added or taken away since."""
    if build.listed is None or build.config != config.recorded():
        return False
    return source.version() == build.listed.source


def listed_before(survey: Survey, recipe: Recipe) -> Wanted | None:
    """The plan's rows, as spec and records state them; None where the plan's file is not the one that was made of the
    source, or the cache is not planned to the end.
    """
    spec, plan, seal = survey.spec.value, survey.plan.value, survey.seal.value
    listed = survey.build.value and survey.build.value.listed
    if spec is None or plan is None or not listed or (seal and seal.plan_file != plan.file):
        return None
    if (listed.plan_digest, listed.plan_file) != (spec.plan_digest, plan.file):
        return None
    rows = rows_on_disk(plan.plan, spec.samples_per_shard, spec.rows, plan.digests)
    return Wanted(samples=rows, recipe=recipe, source_version=listed.source)


def listed_in(work: Work, plan_file: FileRecord) -> Listed | None:
    """What to keep of a list that was made, once its plan is on disk."""
    if work.source_version is None:
        return None
    return Listed(source=work.source_version, plan_digest=work.spec.plan_digest, plan_file=plan_file)
