"""The commands that make a cache: each reads the facts, decides by them, and acts; every check comes before a write.

A single-process build does all, and resumes if it was stopped. Or the work is split: plan once, encode with any number
of ranks at the same time, seal once. A rank builds only its own shards and writes only absent files; `plan` or a
single-process build writes all metadata and replaces files. So ranks need not know of each other: two ranks that build
the same shard write the same bytes, and a dead rank is run again, under the same number or another.
"""

from dataclasses import replace
from pathlib import Path

from cache_store.cache.metadata import read_seal, read_spec, refuse_foreign_place, refuse_no_cache
from cache_store.errors import CacheError, NoCacheError
from cache_store.format.layout import SPEC_FILE
from cache_store.format.schema import Spec
from cache_store.log import log_info, log_warning
from cache_store.messages import counted, shell_word
from cache_store.program.running import usable_cores
from cache_store.storage.store import Address, Store, is_url, open_store, with_listing
from cache_store.verify.findings import SHOWN, Report, as_text
from cache_store.verify.scope import Level
from cache_store.verify.verify import stray_findings, verify
from precompute.config import BuildConfig, RepairConfig, advising_on_moved_paths
from precompute.encode.launchers import encoder_of_worker, refuse_unreachable_workers
from precompute.encode.pipeline import library_versions
from precompute.encode.progress import Encoded
from precompute.encoders.registry import load_encoder
from precompute.images.decode import silence_decoders
from precompute.inputs import make_reader
from precompute.rerun.carry_out import (
    Summary,
    build_shards,
    make_way_for_ranks,
    resume_withdrawal,
    seal_cache,
    write_metadata,
)
from precompute.rerun.compare_images import compare_images, judge_images, retry_rejected
from precompute.rerun.decide import Work, certain_bytes, decide, decide_planned
from precompute.rerun.facts import BuildInputs, Facts, read_facts, read_planned_facts
from precompute.rerun.rank import Rank
from precompute.rerun.refusals import refuse_little_space, refuse_mending, refuse_missing_shards
from precompute.rerun.request import BuildRequest, damaged_shards, read_report
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
        facts = read_facts(inputs, resume_withdrawal(inputs.store))
        work = write_metadata(inputs, facts, decide_all(inputs, facts))
        del facts  # the list's temporary file too: from here on, nothing grows with the data set
        return seal_cache(inputs.store, work, build_shards(inputs, work, work.to_build))


def plan_for_ranks(config: BuildConfig, request: BuildRequest) -> Work:
    """Write the plan and the metadata, so that ranks can build the shards; return the work left.

    Run it again to extend or to retry. Raises StaleError, and touches nothing, if the cache was made from other inputs;
    CacheError if shards need mending.
    """
    inputs = open_build_inputs(config, request)
    with inputs.store.claim():
        facts = read_facts(inputs, resume_withdrawal(inputs.store))
        work = decide_all(inputs, facts)
        refuse_mending(inputs.store, work.shards_to("mend"), request)
        work = write_metadata(inputs, facts, work, for_ranks=True)
        make_way_for_ranks(inputs.store, work)
        return work


def build_rank(config: BuildConfig, request: BuildRequest, rank: Rank) -> Encoded:
    """Build this rank's uncommitted shards of a planned cache, while other ranks build theirs."""
    refuse_unplanned(open_store(config.cache), request)
    refuse_unreachable_workers(config)
    inputs = open_build_inputs(with_own_gpu(config, rank), request)
    with inputs.store.claim(shared=True):
        work = decide_planned(read_planned_facts(inputs, as_stated=True), request).without_plan()
        return build_shards(inputs, work, rank.shards_of(work.to_build), shared=True).encoded


def seal_after_ranks(config: BuildConfig, request: BuildRequest) -> Summary:
    """Seal a cache; raise CacheError naming the shards that are not committed."""
    refuse_unplanned(open_store(config.cache), request)
    inputs = open_build_inputs(config, request)
    with inputs.store.claim():
        work = decide_planned(read_planned_facts(inputs), request).without_plan()
        refuse_missing_shards(inputs.store, work.to_build, work.spec.num_shards)
        return seal_cache(inputs.store, work, build_shards(inputs, work, []))


def open_build_inputs(config: BuildConfig, request: BuildRequest) -> BuildInputs:
    silence_decoders()
    library_versions()  # fails now if a library that shards are recorded with is missing, not after planning
    config = config.prepared()
    store = open_store(config.cache)
    refuse_foreign_place(store, "cache")
    source = open_source(config.source, config.media)
    encoder = load_encoder(config.planning_encoder, config.image_recipe)
    return BuildInputs(config=config, request=request, store=store, source=source, encoder=encoder)


def decide_all(inputs: BuildInputs, facts: Facts) -> Work:
    """Decide by the facts, and then by the images that this decision concerns; write nothing.

    Raises StaleError if an encoded image changed.
    """
    config, request, store = inputs.config, inputs.request, inputs.store
    work, threads = decide(facts, request), config.run.threads(1)
    if facts.survey.has_cache:
        reader = make_reader(inputs.source, work.spec.array, inputs.encoder.texts)
        if request.retry_rejected and work.spec.array.text is None:
            work = retry_rejected(store, work, reader, threads)
        if work.spec.array.text is None:
            work = judge_images(store, work, compare_images(facts.survey, work, reader, request, threads), request)
        elif request.check_sources and not facts.num_other_texts:  # a listing compares all texts
            note = f"{counted(work.rows_before, 'text')} compared; every encoded text is unchanged"
            work = replace(work, notes=(note, *work.notes))
    if work.to_build:
        warn_of_large_shards(work.spec)
    if config.run.check_space:
        refuse_little_space(store, certain_bytes(work, config.run.max_reject_fraction), facts.free_bytes)
    return work


def warn_of_large_shards(spec: Spec) -> None:
    """Log a warning if a stopped build would lose a shard that takes long."""
    bytes_of = {array.size.name: array.sample_bytes for array in spec.sized_arrays}
    largest = max(run.rows * bytes_of[run.array] for run in spec.shards)
    if largest > LARGE_SHARD_BYTES:
        log_warning(
            f"a shard takes {largest / 1e9:,.1f} GB, and a stopped build loses the one in hand; a smaller "
            "store.samples_per_shard, such as 64 for clips, loses less"
        )


def with_own_gpu(config: BuildConfig, rank: Rank) -> BuildConfig:
    """Give the rank its own GPU if several ranks share its node; a rank alone on its node uses all GPUs."""
    return config if rank.local is None else replace(config, encoder=encoder_of_worker(config.encoder, rank.local))


def refuse_unplanned(store: Store, request: BuildRequest) -> None:
    """Raise NoCacheError if the cache has no plan; call it before anything is loaded."""
    if not store.has(SPEC_FILE):
        raise NoCacheError(f"{store} has no plan; first run: {request.with_options()}")


def repair(cache: Address, config: RepairConfig) -> Summary:
    """Rebuild the named shards with the source and encoder recorded in the cache, and reseal.

    Raises StaleError, and touches nothing, if source or encoder changed or the report is of another cache, or keeps the
    old shards if rebuilt ones differ; Interrupted after a signal (run the same repair again to resume).
    """
    refuse_no_cache(open_store(cache))
    report = read_report(Path(config.report).expanduser()) if config.report else None
    rebuild = {*config.shard_numbers, *(still_damaged(cache, report) if report else ())}
    build_config = BuildConfig.of_cache(cache)
    with advising_on_moved_paths(cache):
        return build(build_config, BuildRequest(rebuild=rebuild, new_samples="leave out", report=report))


def still_damaged(cache: Address, report: Report) -> set[int]:
    """Read the shards that a report names again; return those that are not sound now."""
    if not (named := damaged_shards(report)):
        return named
    level: Level = "deep" if report.level == "deep" else "full"
    now = verify(cache, level, subset=named, jobs=usable_cores())
    if now.shards and (sound := sorted(named - damaged_shards(now))):  # without a spec, no shard was read
        numbers = ", ".join(map(str, sound[:SHOWN])) + (", …" if len(sound) > SHOWN else "")
        log_info(f"{counted(len(sound), 'shard')} of the report found sound now, and kept: {numbers}")
        named -= {*sound}
    return named


def refuse_strays(cache: Address, config: RepairConfig) -> None:
    """Raise CacheError if stray files that the report names are still there: no repair deletes them."""
    if not config.report:
        return
    store, report = open_store(cache), read_report(Path(config.report).expanduser())
    reported = {each.file for each in report.findings if each.kind == "stray"}
    if not reported:
        return
    strays = stray_findings(with_listing(store), read_spec(store), read_seal(store))
    if left := [each.file for each in strays if as_text(each.file) in reported]:
        named = [shell_word(store.where(name)) for name in left[:SHOWN]]
        more = f"\n  and {len(left) - SHOWN:,} more that the report names" if len(left) > SHOWN else ""
        command = "delete:\n  " if is_url(cache) else "run:\n  rm -r -- "
        raise CacheError(
            f"all is mended but for {counted(len(left), 'stray')} of the report, which no command deletes; unless a "
            f"build is running, {command}{' '.join(named)}{more}"
        )
