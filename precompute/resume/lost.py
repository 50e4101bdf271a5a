"""Refusals where the plan or the spec is lost: samples tables and build.json still tell what differs."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pyarrow as pa

from cache_store.cache.metadata import read_build
from cache_store.errors import CacheError
from cache_store.format.plan import DIGESTED, read_plan
from cache_store.format.schema import BUILD_FILE, PLAN_FILE, PLAN_SCHEMA, Spec
from cache_store.refusal import Difference, differing, refuse
from precompute.config import BuildConfig
from precompute.plan import PlanDifference, compare_plans
from precompute.resume.kept import sound_seal
from precompute.resume.remembered import remembered_samples, shards_with_tables
from precompute.resume.stale import list_differences

NOT_OF_THE_SPEC = ("encoder.device",)
"""Fields of a build's config that may differ from run to run."""


def remembered_plan(root: Path) -> pa.Table:
    """The planned samples that samples tables hold, of shards whose records vouch for the table."""
    schema = pa.schema([PLAN_SCHEMA.field(name) for name in DIGESTED])
    tables = (remembered_samples(root, shard, DIGESTED) for shard in shards_with_tables(root))
    return pa.concat_tables([schema.empty_table(), *(table.cast(schema) for table in tables if table is not None)])


def held_plan(root: Path) -> pa.Table:
    """The planned samples by the plan file, or else as far as samples tables hold them."""
    try:
        return read_plan(root)
    except CacheError:
        return remembered_plan(root)


def refuse_unplanned(root: Path, cached: Spec, found: pa.Table) -> NoReturn:
    """StaleError where the plan file is lost and the source's samples are not the planned ones."""
    held = remembered_plan(root)
    difference = what_differs(held, found, whole=held.num_rows == cached.rows)
    named = f": {difference}" if str(difference) else ""
    refuse(
        f"{root / PLAN_FILE} is lost, and the source's samples are not those it was made from{named}; the cache is "
        "untouched",
        list_differences(cached.rows, found.num_rows, difference),
        ["restore the source and run the same command again, and the file is restored"],
    )


def what_differs(held: pa.Table, found: pa.Table, whole: bool) -> PlanDifference:
    """Of a part of the plan, no sample can be called new."""
    difference = compare_plans(held, found)
    return difference if whole else replace(difference, added=[])


def refuse_without_spec(config: BuildConfig, problem: str, asked: Spec, found: pa.Table) -> NoReturn:
    """StaleError where the spec is lost, and what is asked for is not what the cache was made from."""
    root, name = config.root, shlex.quote(str(config.root))
    of_config, of_samples = config_differences(config), sample_differences(root, found)
    remember = (
        f"to restore it from what {BUILD_FILE} remembers: cache-store verify {name} --report FILE; "
        f"precompute repair {name} --report FILE"
    )
    restore = "restore what it was made from and run the same command again, and the file is restored"
    refuse(
        f"{problem}; it cannot be made again from this config and source, which are not those that the cache was made "
        "from; the cache is untouched",
        [*of_config, *of_samples] or digest_difference(root, asked),
        [remember if of_config else restore],
    )


def config_differences(config: BuildConfig) -> list[Difference]:
    try:
        before = read_build(config.root).config
    except CacheError:
        return []
    return [each for each in differing(before, config.recorded()) if each.field not in NOT_OF_THE_SPEC]


def sample_differences(root: Path, found: pa.Table) -> list[Difference]:
    try:
        held, whole = read_plan(root), True
    except CacheError:
        held, whole = remembered_plan(root), False
    difference = what_differs(held, found, whole)
    return list_differences(held.num_rows, found.num_rows, difference) if str(difference) else []


def digest_difference(root: Path, asked: Spec) -> list[Difference]:
    """All that is left to say, such as where other weights lie at the same place."""
    seal = sound_seal(root)
    return [Difference("spec digest", seal.spec_digest if seal else "lost", asked.digest)]
