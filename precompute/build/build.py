"""`precompute build` from plan to seal, and again from wherever it stopped.

Everything that can be refused is refused before anything is written.
"""

import threading
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from cache_store.cache.metadata import read_build, refuse_foreign_place
from cache_store.cache.survey import Survey, survey
from cache_store.cache.writing.seal import make_seal, refuse_non_canonical, write_seal
from cache_store.cache.writing.withdrawn import withdrawn_shards
from cache_store.errors import CacheError, Interrupted
from cache_store.format.names import SEAL_FILE
from cache_store.format.schema import BuildRecord, FileRecord, Seal
from cache_store.log import log_info
from cache_store.program.stop_signals import stop_on_signals
from cache_store.refusal import printable
from cache_store.storage.objects.callers import giving_up
from cache_store.storage.store import Store, open_store
from cache_store.verify.leftovers import clear_leftovers
from precompute.build.space import refuse_little_space
from precompute.config import BuildConfig
from precompute.encode.engines import ENGINES, refuse_no_engine
from precompute.encode.job import EncodeJob
from precompute.encode.progress import BuildProgress, Encoded
from precompute.encoders.encoder import Encoder
from precompute.encoders.registry import load_encoder
from precompute.images.decoder_messages import silence_decoders
from precompute.images.rejected import TooManyRejectsError
from precompute.plan.make import make_plan
from precompute.plan.missing import refuse_missing_images, refuse_missing_texts
from precompute.plan.spec import recipe_of
from precompute.resume.act import write_metadata
from precompute.resume.decide import Wanted, Work, decide
from precompute.resume.images import examine_images, sample_changes
from precompute.resume.listed import is_source_unchanged, known_plan, wanted_by_plan
from precompute.resume.refusals import refuse_mismatched_shards
from precompute.resume.rejected import refuse_rejected, try_rejected
from precompute.resume.request import BuildRequest
from precompute.sources import Source, open_source


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a build did, and the cache it leaves."""

    seal: Seal
    encoded: Encoded
    tried_again: int
    """Rejected samples that were tried again."""
    recovered: int
    """Of them, those cached now."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a build is asked, and what it reads."""

    config: BuildConfig
    request: BuildRequest
    store: Store
    source: Source
    encoder: Encoder


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was found of a cache, and what is to be done."""

    surveyed: Survey
    work: Work
    tried: int
    """Rejected samples that were tried again."""
    passed_over: str = ""
    """What the source holds beside samples, if it was listed just now."""

    @property
    def replaced(self) -> set[int]:
        """Shards that were there, or may be: damaged, to be mended, to be filled or tried again."""
        work = self.work
        opened = [] if work.open_shard is None else [work.open_shard]
        return {*self.surveyed.shards, *work.allowed_digests, *work.recovered, *opened}


def build(config: BuildConfig, request: BuildRequest | None = None) -> Summary:
    """Bring the cache to its sealed state; committed shards that fit are kept, but for what is requested.

    Raises StaleError, with nothing touched, where the cache was made from other inputs; Interrupted where a signal
    came while encoding; EncodeOnceError where too many samples are rejected.
    """
    refuse_no_engine(config)
    inputs = open_inputs(config, request or BuildRequest())
    wanted = list_if_changed(inputs)
    with inputs.store.claim():
        decision = decide_work(inputs, wanted)
        refuse_little_space(config, inputs.store, decision.work)
        plan_file = write_planned(inputs, decision)
        tried, replaced = decision.tried, decision.replaced
        work = decision.work.without_plan()  # it is on disk now; nothing below grows with the data set
        del wanted, decision
        progress = build_missing(inputs, work, work.to_build, replaced=replaced)
        return seal_all(inputs, work, progress, plan_file, tried)


def open_inputs(config: BuildConfig, request: BuildRequest) -> Inputs:
    silence_decoders()
    config = config.prepared()
    store = open_store(config.cache)
    refuse_foreign_place(store, "cache")
    source = open_source(config.source)
    encoder = load_encoder(config.own_encoder, config.image.range)
    return Inputs(config=config, request=request, store=store, source=source, encoder=encoder)


def list_if_changed(inputs: Inputs) -> Wanted | BuildRecord:
    """List the source; or return the cache's build record, if a build that only goes on can go by the cache's plan."""
    version = inputs.source.version()
    if not inputs.request.asks_for_more:
        with suppress(CacheError, OSError):  # a survey names what is wrong with it
            record = read_build(inputs.store)
            if is_source_unchanged(record, inputs.config, version):
                return record
    return list_samples(inputs, version)


def list_samples(inputs: Inputs, version: str | None) -> Wanted:
    """What is wanted of the cache, by all that the source has; `version` is the source's, from before."""
    config, samples = inputs.config, inputs.source.samples()
    found = make_plan(samples, config.store.samples_per_shard, f"source.path: {config.source.path}")
    if config.source.text:
        refuse_missing_texts(found, config.source, config.run.max_reject_fraction)
    elif refuse_missing_images(found, config.source, config.run.max_reject_fraction):
        version = None  # each build asks anew whether so many may be missing
    recipe = recipe_of(config, inputs.encoder)
    return Wanted(samples=found, recipe=recipe, source_version=version, passed_over=samples.passed_over)


def decide_work(inputs: Inputs, found: Wanted | BuildRecord) -> Decision:
    """Look at the cache, which is claimed, and decide; nothing is written."""
    if isinstance(found, Wanted):
        surveyed, wanted = survey(inputs.store, found.samples.known_plan), found
    else:
        assert found.listed is not None
        surveyed = survey(inputs.store, known_plan(found.listed))
        planned = wanted_by_plan(surveyed, found, recipe_of(inputs.config, inputs.encoder))
        wanted = planned or list_samples(inputs, found.listed.source)
    work = decide(surveyed, wanted, inputs.request)
    work, tried = look_at_images(inputs.config, surveyed, work, inputs.source, inputs.request)
    return Decision(surveyed=surveyed, work=work, tried=tried, passed_over=wanted.passed_over)


def write_planned(inputs: Inputs, decision: Decision) -> FileRecord:
    """Write what metadata is missing or new; say what a person should know before the encoding, which takes days.

    Returns what the plan's file is.
    """
    plan_file = write_metadata(decision.surveyed, decision.work, inputs.config)
    for note in filter(None, (decision.passed_over, None if decision.surveyed.has_cache else inputs.config.overlap)):
        log_info(printable(note))
    return plan_file


def look_at_images(
    config: BuildConfig, surveyed: Survey, work: Work, source: Source, request: BuildRequest
) -> tuple[Work, int]:
    """The work with shards of rejected samples that succeed now, how many were tried; StaleError for changed images.

    Texts stand in the plan, which is the source's by its digest: none can have changed, or have come, unseen.
    """
    if work.spec.array.text is not None:
        return work, 0
    threads, tried = config.run.threads(1), 0
    if request.retry_rejected:
        tried, rejected_before = try_rejected(surveyed.store, work, source, threads)
        work = work.recovering(rejected_before)
    if examine_images(surveyed, work, source, request, threads):
        work = replace(work, source_version=None)  # each build names them anew
    return work, tried


def build_missing(
    inputs: Inputs, work: Work, shards: Sequence[int], *, shared: bool = False, replaced: Collection[int] = ()
) -> BuildProgress:
    """Build these shards of the work, perhaps beside others; what was done, and how fast.

    A build alone replaces files; of a store that keeps nobody else out, those of shards only that are `replaced`, or
    were when an earlier build died.
    """
    spec, store, config, request = work.spec, inputs.store, inputs.config, inputs.request
    allowed, rows = work.allowed_digests, sum(len(spec.shard_rows(shard)) for shard in shards)
    new = set() if store.keeps_others_out else {*shards} - {*replaced, *withdrawn_shards(store)}
    job = EncodeJob(
        config=config, store=store, spec=spec, shards=shards, allowed_digests=allowed, shared=shared, new=new
    )
    limit = config.run.max_reject_fraction
    made_of, kept = spec.array.made_of, work.kept.values()
    with closing(BuildProgress(spec.rows, kept, limit, to_build=rows, shared=shared, made_of=made_of)) as progress:
        try:
            progress.refuse_too_many_rejects()
            if shards:
                # The seal stays where shards have to come out as it says: mending that stops halfway forgets nothing.
                if not shared and (work.samples_differ or not allowed):
                    store.delete(SEAL_FILE)
                encode(job, inputs, progress)
        except TooManyRejectsError as error:
            allow = "to go on without such samples, allow more of them with --run.max_reject_fraction"
            refuse_rejected(str(error), store, spec, request, allow)
    if progress.all_rejected:
        none = f"{store}: none of {spec.rows:,} samples could be cached, so there is nothing to seal"
        refuse_rejected(none, store, spec, request)
    return progress


def encode(job: EncodeJob, inputs: Inputs, progress: BuildProgress) -> None:
    """Build the job's shards; StaleError where one does not come out as it has to, Interrupted after a signal."""
    stop = threading.Event()
    # Threads and processes have to be told; elsewhere, a signal unwinds us.
    with stop_on_signals(stop.set), giving_up(stop.is_set):
        ENGINES[job.config.run.engine](job, inputs.source, inputs.encoder, stop, progress)
    mismatched = progress.mismatched
    changes = {shard: list(sample_changes(job.store, each)) for shard, each in mismatched.items()}
    refuse_mismatched_shards(job.store, mismatched, job.allowed_digests, changes, inputs.request)
    if stop.is_set() and not job.shared:  # too late for the encoder to notice
        raise Interrupted("every shard is committed; run the same command again to seal the cache")


def seal_all(inputs: Inputs, work: Work, progress: BuildProgress, plan_file: FileRecord, tried: int = 0) -> Summary:
    """Clear what dead builds left and seal the cache, all of whose shards are committed."""
    clear_leftovers(inputs.store, work.spec)
    seal = seal_of(inputs.store, work, progress, plan_file)
    announce_identity(work, seal)
    left = {shard: progress.built[shard].content.rejected for shard in work.recovered}
    recovered = sum(work.recovered.values()) - sum(left.values())
    return Summary(seal=seal, encoded=progress.encoded, tried_again=tried, recovered=recovered)


def seal_of(store: Store, work: Work, progress: BuildProgress, plan_file: FileRecord) -> Seal:
    """Seal the cache, from the records of all its shards."""
    records = {**work.kept, **progress.built}
    contents = [records[shard].content for shard in range(work.spec.num_shards)]
    refuse_non_canonical(store, contents)
    seal = make_seal(work.spec, contents, plan_file)
    return write_seal(store, seal, work.earlier_seal)


def announce_identity(work: Work, seal: Seal) -> None:
    """A sealed cache that is another one now."""
    if work.earlier_seal is None or work.earlier_seal.identity == seal.identity:
        return
    others = "its samples are others, so that training begins anew"
    why = others if work.samples_differ else "the seal was not that of these shards"
    log_info(f"the cache's identity was {work.earlier_seal.identity} and is {seal.identity}: {why}")
