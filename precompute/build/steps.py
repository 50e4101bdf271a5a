"""A build in steps: plan once, encode by any number of ranks at the same time, seal once.

A rank is a build that takes only its shards, writes only what is absent, and leaves metadata and everything that would
replace a file to `plan` or to a build alone. So ranks need not know of each other: two that meet in one shard make the
same bytes, and a dead one is run again, as itself or as one of another number.
"""

from dataclasses import replace
from typing import NoReturn

from cache_store.cache.survey import Survey, survey, survey_without_reading_plan
from cache_store.cache.writing.withdrawn import withdraw
from cache_store.errors import CacheError, NoCacheError
from cache_store.format.formats import files_of_shard
from cache_store.format.names import SEAL_FILE, SPEC_FILE
from cache_store.format.schema import Recipe
from cache_store.refusal import counted
from cache_store.storage.store import Store, listed_once, open_store
from cache_store.verify.findings import Finding
from cache_store.verify.leftovers import clear_leftovers
from precompute.build.build import (
    Decision,
    Summary,
    build_missing,
    decide_work,
    list_if_changed,
    open_inputs,
    seal_all,
    write_planned,
)
from precompute.build.rank import Rank
from precompute.build.space import refuse_little_space
from precompute.config import BuildConfig
from precompute.encode.engines import refuse_no_engine
from precompute.encode.engines.local import worker_encoder
from precompute.encode.progress import Encoded
from precompute.plan.ids import abridged
from precompute.plan.rows import rows_on_disk
from precompute.plan.spec import recipe_of
from precompute.resume.decide import Wanted, Work, damaged_metadata, decide
from precompute.resume.request import BuildRequest


def plan(config: BuildConfig, request: BuildRequest) -> Work:
    """Write the plan and all else but shards, so that ranks can build those; again, to extend or to retry. Returns
    what is left to do.

    Raises StaleError, with nothing touched, where the cache was made from other inputs; CacheError where shards have to
    be mended.
    """
    inputs = open_inputs(config, request)
    wanted = list_if_changed(inputs)
    with inputs.store.claim():
        decision = decide_work(inputs, wanted)
        refuse_mending(decision, request)
        refuse_little_space(config, inputs.store, decision.work)
        if decision.work.recovered:
            inputs.store.delete(SEAL_FILE)  # before anything that it vouches for is changed
            for shard in decision.work.recovered:
                withdraw(inputs.store, shard)
        write_planned(inputs, decision)
        clear_unfinished(inputs.store, decision.work)
        return decision.work.without_plan()


def build_rank(config: BuildConfig, request: BuildRequest, rank: Rank) -> Encoded:
    """Build those shards of a planned cache that are the rank's and not committed, while others build theirs."""
    refuse_unplanned(open_store(config.cache), request)
    refuse_no_engine(config)
    inputs = open_inputs(on_its_gpu(config, rank), request)
    with inputs.store.claim(shared=True):
        surveyed = survey_without_reading_plan(inputs.store)
        work = decide_planned(surveyed, recipe_of(inputs.config, inputs.encoder), request).work.without_plan()
        return build_missing(inputs, work, rank.shards_of(work.to_build), shared=True).encoded


def seal(config: BuildConfig, request: BuildRequest) -> Summary:
    """Seal a cache all of whose shards are committed; CacheError naming those that are not."""
    refuse_unplanned(open_store(config.cache), request)
    inputs = open_inputs(config, request)
    with inputs.store.claim():
        decision = decide_planned(survey(inputs.store), recipe_of(inputs.config, inputs.encoder), request)
        assert decision.surveyed.plan.value is not None
        plan_file, work = decision.surveyed.plan.value.file, decision.work.without_plan()
        if missing := work.to_build:
            raise CacheError(
                f"{inputs.store} is not sealed: {len(missing):,} of {work.spec.num_shards:,} shards not committed: "
                f"{abridged(list(map(str, missing)))}; run their ranks again, then seal"
            )
        progress = build_missing(inputs, work, [])
        return seal_all(inputs, work, progress, plan_file)


def clear_unfinished(store: Store, work: Work) -> None:
    """Delete files of shards without a record: ranks replace none, and what comes out now may be other than it was."""
    there = listed_once(store)
    for name in (name for shard in work.to_build for name in files_of_shard(work.spec, shard)):
        if there.has(name):
            store.delete(name)
    clear_leftovers(store, work.spec)


def on_its_gpu(config: BuildConfig, rank: Rank) -> BuildConfig:
    """A rank that is one of several on its node takes one of the GPUs that it sees, its own; alone, it takes all."""
    return config if rank.local is None else replace(config, encoder=worker_encoder(config.encoder, rank.local))


def refuse_unplanned(store: Store, request: BuildRequest) -> None:
    """NoCacheError, before anything is loaded, where there is no plan to build from."""
    if not store.has(SPEC_FILE):
        raise NoCacheError(f"{store} has no plan; first run: {request.with_options()}")


def decide_planned(surveyed: Survey, recipe: Recipe, request: BuildRequest) -> Decision:
    """What is left of the plan on disk; the source is not listed again, nor are images looked at: `plan` did that.

    CacheError where planning has not come to its end, or something has to be mended.
    """
    surveyed.raise_unreadable()
    store, spec, plan = surveyed.store, surveyed.spec.value, surveyed.plan.value
    if spec is None or plan is None or (plan.plan.num_rows, plan.digests.whole) != (spec.rows, spec.plan_digest):
        refuse_unfinished(store, surveyed.spec.problem or surveyed.plan.problem, request)
    planned = rows_on_disk(plan.plan, spec.samples_per_shard, spec.rows, plan.digests)
    work = decide(surveyed, Wanted(samples=planned, recipe=recipe), request)
    decision = Decision(surveyed=surveyed, work=work, tried=0)
    refuse_mending(decision, request)
    damage = next(damaged_metadata(surveyed, work.spec), None)
    if damage or work.writes_plan:
        refuse_unfinished(store, damage, request)
    return decision


def refuse_unfinished(store: Store, damage: Finding | Exception | None, request: BuildRequest) -> NoReturn:
    why = f" ({damage})" if damage else ""
    raise CacheError(f"{store} is not planned to the end{why}; first run: {request.with_options()}")


def refuse_mending(decision: Decision, request: BuildRequest) -> None:
    """CacheError where shards that were there have to come out as they were: that is work for one build."""
    if damaged := shards_to_mend(decision):
        shards = f"{counted(len(damaged), 'shard')} ({abridged(list(map(str, damaged)))})"
        raise CacheError(
            f"{decision.surveyed.store}: lost or damaged: {shards}, which only a build alone mends; first run: "
            f"{request.alone}"
        )


def shards_to_mend(decision: Decision) -> list[int]:
    """Those to be built of which there is a record, be it damaged, or of which the seal says what they were."""
    work = decision.work
    known = {*decision.surveyed.shards, *work.allowed_digests} - {work.open_shard, *work.recovered}
    return [shard for shard in work.to_build if shard in known]
