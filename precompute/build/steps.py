"""The commands that make a cache: each reads the facts, decides by them, and acts; every check comes before a write.

A single-process build does all, and resumes if it was stopped. Or the work is split: plan once, encode with any number
of ranks at the same time, seal once. A rank builds only its own shards and writes only absent files; `plan` or a
single-process build writes all metadata and replaces files. So ranks need not know of each other: two ranks that build
the same shard write the same bytes, and a dead rank is run again, under the same number or another.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cache_store.cache.metadata import (
    PartOnDisk,
    has_cache,
    refuse_foreign_place,
    write_build,
)
from cache_store.cache.survey import Survey, held_recipe, survey, survey_as_rank
from cache_store.copy.withdraw import resume_withdrawal
from cache_store.errors import CacheError, EncodeOnceError, Interrupted, NoCacheError
from cache_store.format.layout import SPEC_FILE, planned_file
from cache_store.format.schema import Spec, joined_runs
from cache_store.log import log_info, log_warning
from cache_store.messages import counted, printable
from cache_store.storage.store import Store, open_store
from cache_store.verify.verify import clear_leftovers
from precompute.build.compare_images import compare_images, judge_images, retry_rejected
from precompute.build.decide import Work, damaged_metadata, decide
from precompute.build.inputs import BuildInputs, make_arranger
from precompute.build.planning import PlannedPart, forget_planned, plan_as_rank, plan_named_parts, plan_table
from precompute.build.refusals import (
    refuse_damage,
    refuse_lost_list,
    refuse_lost_recipe,
    refuse_missing_shards,
    refuse_other_inputs,
    refuse_other_list,
    refuse_unfinished_plan,
)
from precompute.build.request import BuildRequest
from precompute.build.source import SourceNow, list_source, listed_now, look_at_source, refuse_unfit_parts
from precompute.build.stated import Planned, Stated, spec_of, stated_of
from precompute.build.write import (
    Summary,
    build_shards,
    delete_shard_files,
    drop_parts,
    seal_cache,
    write_metadata,
)
from precompute.config import BuildConfig
from precompute.encode.launchers import encoder_of_worker
from precompute.encode.pipeline import library_versions
from precompute.encode.progress import Encoded
from precompute.encode.rank import Rank
from precompute.encode.ray_actors import refuse_unreachable_workers
from precompute.encoders.registry import load_encoder
from precompute.images.decode import silence_decoders
from precompute.sources.opening import open_source

LARGE_SHARD_BYTES = 2**32
"""A shard of 4,096 float16 latents of 1024 x 1024 images takes half as much."""


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


def plan_for_ranks(config: BuildConfig, request: BuildRequest) -> Work:
    """Write the plan and the metadata, so that ranks can build the shards; return the work left.

    Run it again to extend or to retry. Raises StaleError, and touches nothing, if the cache was made from other inputs;
    CacheError if it is damaged.
    """
    inputs = open_build_inputs(config, request)
    with inputs.store.claim():
        work = plan(inputs, for_ranks=True)
        delete_shard_files(inputs.store, work.spec, work.to_build)  # ranks replace none, and new bytes may differ
        clear_leftovers(inputs.store, work.spec)
        return work


def plan_rank(config: BuildConfig, request: BuildRequest, rank: Rank) -> list[int]:
    """Plan this rank's parts of a new cache, while other ranks plan theirs; return their numbers.

    `plan_for_ranks` then joins them. Raises CacheError if the cache is planned, or another list is being planned.
    """
    inputs = open_build_inputs(config, request)
    with inputs.store.claim(shared=True):
        if has_cache(inputs.store):
            raise CacheError(f"{inputs.store} is planned; extend it by one process: {request.with_options('--extend')}")
        return plan_as_rank(inputs, list_source(inputs, Stated(survey=Survey(store=inputs.store))), rank)


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
    """Seal a cache; raise CacheError naming the shards that are not committed."""
    refuse_unplanned(open_store(config.cache), request)
    inputs = open_build_inputs(config, request)
    with inputs.store.claim():
        work = planned_work(inputs, survey(inputs.store))
        refuse_missing_shards(inputs.store, work.to_build, work.spec.num_shards)
        return seal_cache(inputs.store, work, build_shards(inputs, work, []))


def open_build_inputs(config: BuildConfig, request: BuildRequest) -> BuildInputs:
    silence_decoders()
    library_versions()  # fails now if a library that shards are recorded with is missing, not after planning
    config = config.prepared()
    refuse_foreign_place(store := open_store(config.cache), "cache")
    source = open_source(config.source, config.media)
    encoder = load_encoder(config.planning_encoder, config.image_recipe)
    return BuildInputs(config=config, request=request, store=store, source=source, encoder=encoder)


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


def refuse_to_mend(inputs: BuildInputs, stated: Stated, damage: Sequence[str]) -> None:
    """Raise CacheError for damage, unless this is a repair; before, write the record that a repair needs."""
    if damage and stated.spec and not inputs.request.mends and stated.survey.build.value is None:
        write_build(inputs.store, inputs.config.recorded(), spec_digest=stated.spec.digest)
    refuse_damage(inputs.store, damage, inputs.request)


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


def refuse_other_samples(stated: Stated, now: SourceNow, request: BuildRequest) -> int:
    """Raise StaleError if the source lacks samples of the cache, or has more; return how many are left out."""
    survey, spec = stated.survey, stated.spec
    if not survey.has_cache or now.listing is None:
        return 0
    if spec is None or now.missing:
        now.count_new()
        refuse_lost_list(survey, now.listing.rows)
    if now.other_texts:
        name = shlex.quote(str(survey.store))
        raise CacheError(
            f"{survey.store}: the texts of {counted(len(now.other_texts), 'part')} are lost, and the source has others "
            f"now; restore its files, or take these: precompute captions {name}"
        )
    if request.new_samples == "append" and not now.difference:
        return 0
    is_other, num_new = bool(now.difference), now.count_new()
    if is_other or (num_new and request.new_samples == "refuse"):
        refuse_other_list(survey.store, spec.rows, now.listing.rows, now.difference, request)
    return num_new


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
    """Decide by what is stated, and then by the images that this decision concerns; write nothing.

    Returns the parts whose fingerprints have to stay, too. Raises StaleError if an encoded image changed.
    """
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


def growth_notes(stated: Stated, now: SourceNow, work: Work, num_left_out: int) -> Iterator[str]:
    if num_left_out:
        yield f"new in the source: {counted(num_left_out, 'sample')}; `precompute build … --extend` adds them"
    if work.is_extension:
        kept = f"; {counted(len(work.kept), 'shard')} kept" if work.kept else ""
        yield f"extending from {work.rows_before:,} to {counted(work.spec.rows, 'sample')}{kept}"
    elif now.num_other_texts:
        name = shlex.quote(str(stated.survey.store))
        yield f"the source has other texts now, which `precompute captions {name}` reads; those of before stay"


def planned_work(inputs: BuildInputs, surveyed: Survey, rank: Rank | None = None) -> Work:
    """Decide the work left of the plan on disk, all or a rank's; `plan` has checked list and images.

    Raises CacheError if planning has not finished, or if a repair has to mend the cache first.
    """
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


def warn_of_sizes(store: Store, work: Work) -> None:
    """Log a warning if a stopped build would lose a shard that takes long, or if a new cache may not fit."""
    spec, free = work.spec, store.free_bytes()
    bytes_of = {array.size.name: array.sample_bytes for array in spec.sized_arrays}
    largest = max(run.rows * bytes_of[run.array] for run in spec.shards)
    if largest > LARGE_SHARD_BYTES:
        log_warning(
            f"a shard takes {largest / 1e9:,.1f} GB, and a stopped build loses the one in hand; a smaller "
            "store.samples_per_shard, such as 64 for clips, loses less"
        )
    if free is not None and spec.sample_bytes > free and spec.array.codec == "none" and not work.kept:
        log_warning(f"{store}: its latents take up to {spec.sample_bytes:,} bytes, and {free:,} are free there")


def refuse_unplanned(store: Store, request: BuildRequest) -> None:
    if not store.has(SPEC_FILE):
        raise NoCacheError(f"{store} has no plan; first run: {request.with_options()}")
