"""`precompute build` from plan to seal, and again from wherever it stopped.

Everything that can be refused is refused before anything is written.
"""

import threading
from contextlib import closing
from dataclasses import dataclass

from cache_store.cache.files import file_record
from cache_store.cache.metadata import refuse_others
from cache_store.cache.seal import make_seal, refuse_other_form, write_seal
from cache_store.cache.survey import Survey, survey
from cache_store.errors import Interrupted
from cache_store.format.names import PLAN_FILE, SEAL_FILE
from cache_store.format.schema import FileRecord, Seal
from cache_store.program.stop_signals import stop_on_signals
from cache_store.storage.store import Store, open_store
from cache_store.verify.leftovers import clear_leftovers
from precompute.config import BuildConfig
from precompute.encode.engines import ENGINES
from precompute.encode.job import EncodeJob
from precompute.encode.progress import BuildProgress, say
from precompute.encoders.encoder import Encoder
from precompute.encoders.registry import load_encoder
from precompute.images.decoder_messages import silence_decoders
from precompute.images.rejected import TooManyRejectsError
from precompute.plan import make_plan, refuse_missing_images
from precompute.resume.act import write_metadata
from precompute.resume.decide import Wanted, Work, decide
from precompute.resume.images import examine_images, sample_changes
from precompute.resume.refusals import refuse_mismatched_shards
from precompute.resume.rejected import refuse_rejected, try_rejected
from precompute.resume.request import BuildRequest
from precompute.sources import Source, open_source
from precompute.spec import recipe_of


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a build did, and the cache it leaves."""

    seal: Seal
    built_shards: int
    built_images: int
    images_per_s: float
    waiting_share: float
    """Share of the encoder's time spent waiting for images."""
    tried_again: int
    """Rejected samples that were tried again."""
    recovered: int
    """Of them, those cached now."""


def build(config: BuildConfig, request: BuildRequest | None = None) -> Summary:
    """Bring the cache to its sealed state; committed shards that fit are kept, but for what is requested.

    Raises StaleError, with nothing touched, where the cache was made from other inputs; Interrupted where a signal
    came while encoding; EncodeOnceError where too many samples are rejected.
    """
    silence_decoders()
    store, request = open_store(config.cache), request or BuildRequest()
    refuse_others(store, "cache")
    source = open_source(config.source)
    encoder = load_encoder(config.encoder, config.image.range)
    samples = source.samples()
    found = make_plan(samples)
    refuse_missing_images(found, config.source, config.run.max_reject_fraction)
    wanted = Wanted(samples=found, recipe=recipe_of(config, encoder))
    with store.claim():
        surveyed = survey(store)
        work, tried = look_at_images(config, surveyed, decide(surveyed, wanted, request), source, request)
        write_metadata(surveyed, work, config)
        for note in filter(None, (samples.passed_over, None if surveyed.has_cache else config.overlap)):
            say(note)  # now, as the encoding may take days
        plan_file = surveyed.plan.value.file if surveyed.plan.value and not work.writes_plan else None
        del found, wanted, surveyed
        work = work.without_plan()  # it is on disk now; nothing below grows with the data set
        allowed = work.allowed_digests
        job = EncodeJob(config=config, store=store, spec=work.spec, shards=work.to_build, allowed_digests=allowed)
        progress = build_missing(job, work, source, encoder, request)
        clear_leftovers(store, work.spec)
        seal = seal_of(store, work, progress, plan_file)
        announce_identity(work, seal)
        return build_summary(work, progress, seal, tried)


def look_at_images(
    config: BuildConfig, surveyed: Survey, work: Work, source: Source, request: BuildRequest
) -> tuple[Work, int]:
    """The work with shards of rejected samples that succeed now, how many were tried; StaleError for changed images."""
    threads, tried = config.run.threads(1), 0
    if request.retry_rejected:
        tried, rejected_before = try_rejected(surveyed.store, work, source, threads)
        work = work.recovering(rejected_before)
    examine_images(surveyed, work, source, request, threads)
    return work, tried


def build_missing(job: EncodeJob, work: Work, source: Source, encoder: Encoder, request: BuildRequest) -> BuildProgress:
    """Build every shard that is not kept; what was done, and how fast."""
    spec, limit = job.spec, job.config.run.max_reject_fraction
    with closing(BuildProgress(spec.rows, work.kept.values(), limit)) as progress:
        try:
            progress.refuse_too_many_rejects()
            if job.shards:
                # The seal stays where shards have to come out as it says: mending that stops halfway forgets nothing.
                if work.samples_differ or not job.allowed_digests:
                    job.store.delete(SEAL_FILE)
                encode(job, source, encoder, progress, request)
        except TooManyRejectsError as error:
            allow = "to go on without such samples, allow more of them with --run.max_reject_fraction"
            refuse_rejected(str(error), job.store, spec, request, allow)
    if progress.all_rejected:
        none = f"{job.store}: none of {spec.rows:,} samples could be cached, so there is nothing to seal"
        refuse_rejected(none, job.store, spec, request)
    return progress


def encode(job: EncodeJob, source: Source, encoder: Encoder, progress: BuildProgress, request: BuildRequest) -> None:
    """Build the job's shards; StaleError where one does not come out as it has to, Interrupted after a signal."""
    stop = threading.Event()
    with stop_on_signals(stop.set):  # threads and processes have to be told; elsewhere, a signal unwinds us
        ENGINES[job.config.run.engine](job, source, encoder, stop, progress)
    mismatched = progress.mismatched
    changes = {shard: list(sample_changes(job.store, each)) for shard, each in mismatched.items()}
    refuse_mismatched_shards(job.store, mismatched, job.allowed_digests, changes, request)
    if stop.is_set():  # too late for the encoder to notice
        raise Interrupted("every shard is committed; run the same command again to seal the cache")


def seal_of(store: Store, work: Work, progress: BuildProgress, plan_file: FileRecord | None) -> Seal:
    """Seal the cache, from the records of all its shards."""
    records = {**work.kept, **progress.built}
    contents = [records[shard].content for shard in range(work.spec.num_shards)]
    refuse_other_form(store, contents)
    seal = make_seal(work.spec, contents, plan_file or file_record(store, PLAN_FILE))
    return write_seal(store, seal, work.earlier_seal)


def announce_identity(work: Work, seal: Seal) -> None:
    """A sealed cache that is another one now."""
    if work.earlier_seal is None or work.earlier_seal.identity == seal.identity:
        return
    others = "its samples are others, so that training begins anew"
    why = others if work.samples_differ else "the seal was not that of these shards"
    say(f"the cache's identity was {work.earlier_seal.identity} and is {seal.identity}: {why}")


def build_summary(work: Work, progress: BuildProgress, seal: Seal, tried: int) -> Summary:
    built = progress.built
    return Summary(
        seal=seal,
        built_shards=len(built),
        built_images=progress.images,
        images_per_s=progress.images_per_s,
        waiting_share=progress.waiting_share,
        tried_again=tried,
        recovered=sum(before - built[shard].content.rejected for shard, before in work.recovered.items()),
    )
