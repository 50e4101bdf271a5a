"""A build from top to bottom: rows of a source become planned parts, encoded shards and a sealed cache.

`build` does all of it in one process, and resumes if it was stopped. `plan` reads what the cache says and what the
source lists, decides what is left to do, and only then writes. `build_shards` hands the shards to workers, each of
which runs `encode_shards` in `precompute/encode/pipeline.py`: decode, encode, write, commit. `seal_cache` sums up.

Many machines do the same in steps: one plans, any number of ranks encode, one seals. A rank builds only its own shards
and writes only absent files; whoever plans writes all metadata and replaces files. So ranks need not know of each
other: two that build the same shard write the same bytes, and a dead one is run again, under any number.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from cache_store.cache.commit import sum_up, write_seal
from cache_store.cache.metadata import PartOnDisk, has_cache, refuse_foreign_place
from cache_store.cache.survey import Survey, held_recipe, survey, survey_as_rank
from cache_store.copy.withdraw import resume_withdrawal
from cache_store.errors import CacheError, EncodeOnceError, Interrupted
from cache_store.format.layout import SEAL_FILE, commit_file, planned_file
from cache_store.format.schema import Seal, Spec, joined_runs
from cache_store.log import log_info
from cache_store.messages import counted, printable
from cache_store.program.running import stop_on_signals
from cache_store.storage.store import Store, open_store
from cache_store.verify.verify import clear_leftovers
from precompute.build.compare_images import compare_images, judge_images, retry_rejected
from precompute.build.decide import Work, damaged_metadata, decide
from precompute.build.inputs import BuildInputs, make_arranger
from precompute.build.planning import PlannedPart, forget_planned, plan_as_rank, plan_named_parts, plan_table
from precompute.build.refusals import (
    growth_notes,
    refuse_damage,
    refuse_lost_recipe,
    refuse_mismatched_shards,
    refuse_missing_shards,
    refuse_other_inputs,
    refuse_other_samples,
    refuse_rejected,
    refuse_to_mend,
    refuse_unfinished_plan,
    refuse_unplanned,
    warn_of_sizes,
)
from precompute.build.request import BuildRequest
from precompute.build.source import SourceNow, list_source, listed_now, look_at_source, refuse_unfit_parts
from precompute.build.stated import Planned, Stated, spec_of, stated_of
from precompute.build.write import delete_shard_files, drop_parts, write_metadata
from precompute.config import BuildConfig
from precompute.encode.job import EncodeJob
from precompute.encode.launchers import encoder_of_worker, run_workers
from precompute.encode.pipeline import library_versions
from precompute.encode.progress import BuildProgress, Encoded
from precompute.encode.rank import Rank
from precompute.encode.ray_actors import refuse_unreachable_workers
from precompute.encoders.registry import load_encoder
from precompute.images.decode import silence_decoders
from precompute.images.rejected import CONTINUE, TooManyRejectsError
from precompute.sources.opening import open_source


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a build: its seal and its counts."""

    seal: Seal
    encoded: Encoded
    num_retried: int
    """Rejected samples that were tried again."""
    recovered: int
    """Retried samples that are cached now."""


def build(config: BuildConfig, request: BuildRequest | None = None) -> Summary:
    """Build and seal the cache; keep committed shards that fit, unless `request` asks to rebuild them.

    Raises StaleError, and touches nothing, if the cache was made from other inputs; Interrupted if a signal stops the
    encoding; EncodeOnceError if too many samples are rejected.
    """
    refuse_unreachable_workers(config)
    inputs = open_build_inputs(config, request or BuildRequest())
    with inputs.store.claim():
        work = plan(inputs)
        if inputs.request.mends and (unbuilt := work.shards_to("build")):
            build_shards(inputs, work, work.shards_to("mend", "replace"))
            raise Interrupted(f"mended; {counted(len(unbuilt), 'shard')} were never built: run the build of this cache")
        return seal_cache(inputs.store, work, build_shards(inputs, work, work.to_build))


def open_build_inputs(config: BuildConfig, request: BuildRequest) -> BuildInputs:
    silence_decoders()
    library_versions()  # fails now if a library that shards are recorded with is missing, not after planning
    config = config.prepared()
    refuse_foreign_place(store := open_store(config.cache), "cache")
    source = open_source(config.source, config.media)
    encoder = load_encoder(config.planning_encoder, config.image_recipe)
    return BuildInputs(config=config, request=request, store=store, source=source, encoder=encoder)


# The plan.


def plan(inputs: BuildInputs, *, for_ranks: bool = False) -> Work:
    """Plan what the cache lacks, decide what is left to do, and write the metadata; the caller holds the claim.

    Every check comes before a write, except that new parts are written as they are listed: no reader knows of them
    yet. If the work is refused, those that a rerun would plan anew are deleted.
    """
    store, request = inputs.store, inputs.request
    stated = state_of(inputs, survey(store, resume_withdrawal(store)))
    damage = [*damaged_metadata(stated)]
    refuse_to_mend(inputs, stated, damage)
    now, first = look_at_source(inputs, stated), stated.num_parts
    num_left_out, added = refuse_other_samples(stated, now, request), list[PlannedPart]()
    try:
        if now.listing and (not stated.spec or request.new_samples == "append"):
            added += add_parts(inputs, first, now)
        if added:
            refuse_unfit_parts(store, stated, added, f"source.path: {inputs.config.source.path}")
        if now.listing:
            now.listing.refuse_bare()
        spec = grown_spec(inputs, stated.spec, [each.on_disk for each in added])
        rows = Planned(store, spec, stated, now.found, [each.on_disk for each in added])
        work, changed = decide_all(inputs, stated, rows)
    except EncodeOnceError:
        if first or not (now.listing and now.listing.is_cut):
            drop_parts(store, first)
        for number, each in enumerate(added, start=first):
            if each.bare:  # what is missing may be back
                store.delete(planned_file(number))
        raise
    for part in changed - stated.lost - stated.lost_texts:
        now.found.pop(part, None)  # so that the next build compares these images again
    mended = (f"damage found and mended: {each}" for each in (*damage, *work.damage))
    for note in (*mended, *work.notes, *growth_notes(stated, now, work, num_left_out)):
        log_info(printable(note))
    if now.listing:
        now.listing.say()
    listed = listed_now(inputs, stated, now, len(spec.parts), changed, is_all=not num_left_out)
    return write_metadata(inputs, stated, work, rows, added, listed, for_ranks=for_ranks)


def state_of(inputs: BuildInputs, surveyed: Survey, *, as_rank: bool = False) -> Stated:
    """Return what the cache says of itself; raise StaleError if it was made from other inputs."""
    request, recipe = inputs.request, inputs.recipe
    if not surveyed.has_cache:
        return Stated(survey=surveyed)
    if (held := held_recipe(surveyed)) is None:
        refuse_lost_recipe(surveyed)
    refuse_other_inputs(inputs.store, held, recipe, request)
    if as_rank:
        return Stated(survey=surveyed, spec=surveyed.spec.value)
    return stated_of(surveyed, recipe, inputs.array_of)


def add_parts(inputs: BuildInputs, first: int, now: SourceNow) -> Iterator[PlannedPart]:
    """Plan what is new, as the parts from number `first` on."""
    assert now.listing
    if now.listing.is_cut and not first:
        yield from plan_named_parts(inputs, now.listing)
        return
    forget_planned(inputs.store)
    arrange = make_arranger(inputs)
    for number, table in enumerate(now.new, start=first):
        yield plan_table(inputs.store, now.listing, number, arrange(table))


def grown_spec(inputs: BuildInputs, spec: Spec | None, added: Sequence[PartOnDisk]) -> Spec:
    """Return the spec with these parts behind those that it has."""
    if not added:
        assert spec
        return spec
    more = spec_of(inputs.recipe, added, inputs.array_of)
    if spec is None:
        return more
    arrays = dict.fromkeys([*spec.arrays, *more.arrays])
    return inputs.recipe.spec([*spec.parts, *more.parts], joined_runs([*spec.shards, *more.shards]), arrays)


def decide_all(inputs: BuildInputs, stated: Stated, rows: Planned) -> tuple[Work, frozenset[int]]:
    """Decide by what is stated and by the images concerned; also return the parts whose fingerprints have to stay."""
    config, request, store, survey = inputs.config, inputs.request, inputs.store, stated.survey
    work = decide(stated, rows.spec, rows.facts_of, rows.texts_of, request)
    refuse_to_mend(inputs, stated, work.damage)
    threads, changed = config.run.threads(1), frozenset[int]()
    if survey.has_cache and work.spec.array.text is None:
        if request.retry_rejected:
            work = retry_rejected(store, work, rows, inputs.reader, threads)
        images = compare_images(survey, work, rows, inputs.reader, request, threads)
        work, changed = judge_images(store, work, *images, request)
    elif survey.has_cache and request.check_sources:  # a listing compares all texts
        note = f"{counted(work.rows_before, 'text')} compared; every encoded text is unchanged"
        work = replace(work, notes=(note, *work.notes))
    if work.to_build:
        warn_of_sizes(store, work)
    return work, changed


# The shards, and the seal.


def build_shards(inputs: BuildInputs, work: Work, shards: Sequence[int], *, shared: bool = False) -> BuildProgress:
    """Build these shards, alone or (`shared`) beside other ranks, which replace none; return the progress."""
    spec, store, limit = work.spec, inputs.store, inputs.config.run.max_reject_fraction
    retry = inputs.request.with_options("--retry-rejected")
    counted = BuildProgress(
        spec.rows,
        work.kept.values(),
        limit,
        to_build=sum(len(spec.shard_rows(shard)) for shard in shards),
        shared=shared,
        made_of=spec.array.made_of,
        compute_dtype=spec.array.encoder.compute_dtype,
    )
    with closing(counted) as progress:
        try:
            progress.refuse_too_many_rejects()
            if shards:
                # Keep the seal while shards must match its digests, so that an interrupted repair loses nothing.
                if not shared and not all(task.digest for task in work.tasks.values()):
                    store.delete(SEAL_FILE)
                encode(inputs, encode_job(inputs, work, shards, shared), progress)
        except TooManyRejectsError as error:
            refuse_rejected(str(error), store, spec, retry, CONTINUE)
    if progress.is_all_rejected:
        none = f"{store}: none of {spec.rows:,} samples could be cached, so there is nothing to seal"
        refuse_rejected(none, store, spec, retry)
    return progress


def encode_job(inputs: BuildInputs, work: Work, shards: Sequence[int], shared: bool) -> EncodeJob:
    """Make the job; files of a new shard replace none where another program, or a lost node of Ray, may write them."""
    store, on_ray = inputs.store, inputs.config.run.engine == "ray" and not shared
    new = frozenset(work.shards_to("build") if on_ray or not store.has_exclusive_claims else ())
    if store.has_exclusive_claims:
        delete_shard_files(store, work.spec, new)
    return EncodeJob(
        config=inputs.config,
        store=store,
        spec=work.spec,
        shards=shards,
        digests=work.digests,
        shared=shared,
        never_replace=new,
    )


def encode(inputs: BuildInputs, job: EncodeJob, progress: BuildProgress) -> None:
    """Build the job's shards; raise StaleError if one has the wrong bytes, Interrupted after a signal."""
    is_here = inputs.config.run.engine != "ray"
    if is_here and (inputs.config.encoder.device, inputs.encoder.device.type) == ("auto", "cpu"):
        log_info("encoder.device auto: no GPU that torch can use was found; the CPU encodes")
    with stop_on_signals() as stop:
        run_workers(job, inputs.source, inputs.encoder, progress)
    refuse_mismatched_shards(job.store, progress.mismatched, job.digests, inputs.request)
    if stop.is_set() and not job.shared:  # the signal came after the last batch
        raise Interrupted("every shard is committed; run the same command again to seal the cache")


def seal_cache(store: Store, work: Work, progress: BuildProgress) -> Summary:
    """Delete leftovers of dead builds and seal the cache; every shard must be committed."""
    clear_leftovers(store, work.spec)
    records = {**work.kept, **progress.built}
    contents = [records[shard].content for shard in range(work.spec.num_shards)]
    store.make_durable(commit_file(0))  # and so all other records
    made = sum_up(store, work.spec, contents, work.plan_files, work.earlier_seal if work.is_rolled_up else None)
    seal = write_seal(store, made, work.earlier_seal)
    if work.earlier_seal is not None and work.earlier_seal.identity != seal.identity:
        log_info(f"the cache's identity was {work.earlier_seal.identity} and is {seal.identity}; restart training")
    retried = [(task.rejected, progress.built[shard]) for shard, task in work.tasks.items() if task.rejected]
    recovered = sum(before - record.content.rejected for before, record in retried)
    return Summary(seal=seal, encoded=progress.encoded, num_retried=work.num_retried, recovered=recovered)


# The same in steps, for ranks.


def plan_rank(config: BuildConfig, request: BuildRequest, rank: Rank) -> list[int]:
    """Plan this rank's parts of a new cache, while other ranks plan theirs; `plan_for_ranks` then joins them."""
    inputs = open_build_inputs(config, request)
    with inputs.store.claim(shared=True):
        if has_cache(inputs.store):
            raise CacheError(f"{inputs.store} is planned; extend it by one process: {request.with_options('--extend')}")
        return plan_as_rank(inputs, list_source(inputs, Stated(survey=Survey(store=inputs.store))), rank)


def plan_for_ranks(config: BuildConfig, request: BuildRequest) -> Work:
    """Write plan and metadata, so that ranks can build; return the work left. Run it again to extend or to retry."""
    inputs = open_build_inputs(config, request)
    with inputs.store.claim():
        work = plan(inputs, for_ranks=True)
        delete_shard_files(inputs.store, work.spec, work.to_build)  # ranks replace none, and new bytes may differ
        clear_leftovers(inputs.store, work.spec)
        return work


def build_rank(config: BuildConfig, request: BuildRequest, rank: Rank) -> Encoded:
    """Build this rank's uncommitted shards of a planned cache, while other ranks build theirs."""
    refuse_unplanned(open_store(config.cache), request)
    refuse_unreachable_workers(config)
    if rank.local is not None:  # several ranks share its node; a rank alone there uses all GPUs
        config = replace(config, encoder=encoder_of_worker(config.encoder, rank.local))
    inputs = open_build_inputs(config, request)
    with inputs.store.claim(shared=True):
        work = planned_work(inputs, survey_as_rank(inputs.store, rank.shards_of), rank)
        return build_shards(inputs, work, work.to_build, shared=True).encoded


def seal_after_ranks(config: BuildConfig, request: BuildRequest) -> Summary:
    refuse_unplanned(open_store(config.cache), request)
    inputs = open_build_inputs(config, request)
    with inputs.store.claim():
        work = planned_work(inputs, survey(inputs.store))
        refuse_missing_shards(inputs.store, work.to_build, work.spec.num_shards)
        return seal_cache(inputs.store, work, build_shards(inputs, work, []))


def planned_work(inputs: BuildInputs, surveyed: Survey, rank: Rank | None = None) -> Work:
    """Decide the work left of the plan on disk, all or a rank's; CacheError if planning or a repair comes first."""
    store, request = inputs.store, inputs.request
    if surveyed.build.value and surveyed.build.value.withdrawing:
        refuse_unfinished_plan(store, CacheError("a withdrawal was stopped"), request)
    stated = state_of(inputs, surveyed, as_rank=rank is not None)
    if stated.spec is None or surveyed.build.value is None:
        refuse_unfinished_plan(store, surveyed.build.problem, request)
    refuse_damage(store, [*damaged_metadata(stated)], request)
    rows = Planned(store, stated.spec, stated)
    own = rank.shards_of(range(stated.spec.num_shards)) if rank else None
    work = decide(stated, stated.spec, rows.facts_of, rows.texts_of, request, own)
    refuse_damage(store, work.damage, request)
    if any(shard in surveyed.shards for shard in work.shards_to("replace")):
        refuse_unfinished_plan(store, CacheError("its texts have changed"), request)
    return replace(work, plan_files=tuple(each.file for each in stated.parts.values()))
