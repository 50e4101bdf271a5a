"""Bringing a cache's metadata to what was decided, so that a kill at any instant leaves what a rerun goes on from.

The plan comes first: from then on any build, asked to extend or not, sees that an extension has begun. The spec comes
last: once it is there, the folder is a cache, or one of more rows. Every step can be done twice.
"""

from cache_store.cache.files import file_record, write_plan
from cache_store.cache.metadata import metadata_of, write_build
from cache_store.cache.survey import Survey
from cache_store.cache.writing.withdrawn import withdraw
from cache_store.format.names import PLAN_FILE, SEAL_FILE
from cache_store.format.schema import FileRecord
from cache_store.log import log_info
from cache_store.refusal import printable
from precompute.config import BuildConfig
from precompute.rerun.decide import Work
from precompute.rerun.listed import listed_by


def write_metadata(survey: Survey, work: Work, config: BuildConfig) -> FileRecord:
    """Write metadata that is missing, damaged or changed; of the shards, delete only a partly filled last record.

    Returns what the plan's file is.
    """
    for note in work.notes:
        log_info(printable(note))
    store = survey.store
    if work.writes_plan:
        write_plan(store, map(work.to_write, range(work.spec.num_shards)))
    old = survey.plan.value
    plan_file = old.file if old and not work.writes_plan else file_record(store, PLAN_FILE)
    if work.grows:
        store.delete(SEAL_FILE)  # before anything that it vouches for is changed
        if work.open_shard is not None:
            withdraw(store, work.open_shard)
    listed = listed_by(work, plan_file)
    build = survey.build.value
    if build is None or (build.config, build.listed) != (config.recorded(), listed):
        write_build(store, config.recorded(), listed)
    for name, data in metadata_of(work.spec):
        if survey.metadata.get(name) != data:
            store.put_whole(name, data)
    return plan_file
