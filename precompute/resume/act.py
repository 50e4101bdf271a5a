"""Bringing a cache's metadata to what was decided, so that a kill at any instant leaves what a rerun goes on from.

The plan comes first: from then on any build, asked to extend or not, sees that an extension has begun. The spec comes
last: once it is there, the folder is a cache, or one of more rows. Every step can be done twice.
"""

from pathlib import Path

from cache_store.cache.metadata import write_build
from cache_store.cache.survey import Survey
from cache_store.format.formats import shard_format
from cache_store.format.plan import write_plan
from cache_store.format.schema import PLAN_FILE, SEAL_FILE, SPEC_FILE, commit_file
from cache_store.storage.publish import withdraw, write_file
from precompute.config import BuildConfig
from precompute.encode.progress import say
from precompute.resume.decide import Work


def write_metadata(survey: Survey, work: Work, config: BuildConfig) -> None:
    """Write what is missing, damaged or another now; of the shards only a partly filled last one goes."""
    for note in work.notes:
        say(note)
    root = survey.root
    if work.writes_plan:
        write_plan_of(root, work)
    if work.grows:
        unseal(root)
        if work.open_shard is not None:
            withdraw(root / commit_file(work.open_shard))
    if survey.build.value is None or survey.build.value.config != config.recorded():
        write_build(root, config.recorded())
    files = shard_format(work.spec).metadata(work.spec)
    for name in sorted(files, key=lambda name: name == SPEC_FILE):
        if survey.metadata.get(name) != files[name]:
            write_file(root / name, files[name])


def write_plan_of(root: Path, work: Work) -> None:
    plan, shards = work.to_write, map(work.spec.shard_rows, range(work.spec.num_shards))
    write_plan(root / PLAN_FILE, (plan.slice(rows.start, len(rows)) for rows in shards))


def unseal(root: Path) -> None:
    """Before anything that the seal vouches for is changed."""
    withdraw(root / SEAL_FILE)
