"""`precompute build` from plan to seal, and again from wherever it stopped.

Everything that can be refused is refused before anything is written.
"""

import threading
from dataclasses import dataclass
from functools import partial

from cache_store.cache.metadata import has_cache, refuse_foreign_folder
from cache_store.cache.seal import seal_cache
from cache_store.errors import Interrupted
from cache_store.format.schema import Seal
from cache_store.program.stop_signals import stop_on_signals
from cache_store.storage.claim import claim
from cache_store.verify.leftovers import clear_leftovers
from precompute.config import BuildConfig
from precompute.encode.local import run_local
from precompute.encode.progress import BuildProgress, say
from precompute.encoders.encoder import Encoder
from precompute.encoders.registry import load_encoder
from precompute.images.decoder_messages import silence_decoders
from precompute.images.rejected import TooManyRejectsError
from precompute.plan import make_plan, refuse_missing_images
from precompute.resume.kept import unseal
from precompute.resume.rejections import refuse_all_rejected, too_many
from precompute.resume.request import Acts
from precompute.resume.stale import refuse_other_shards
from precompute.resume.work import Work, begin, go_on
from precompute.sources import Source, open_source
from precompute.sources.listing import PassedOver
from precompute.spec import array_spec, spec_of


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a build did, and the cache it leaves."""

    seal: Seal
    built_shards: int
    built_images: int
    images_per_s: float
    waiting_share: float
    """Share of the encoder's time spent waiting for images."""
    new_samples: int
    """Rows that the cache was extended by."""
    tried_again: int
    """Rejected samples that were tried again."""
    recovered: int
    """Of them, those cached now."""
    passed_over: PassedOver
    """What the source holds besides samples."""


def build(config: BuildConfig, acts: Acts | None = None) -> Summary:
    """Bring the cache to its sealed state; committed shards that fit are kept, but for what `acts` ask.

    Raises StaleError, with nothing touched, where the cache was made from other inputs; Interrupted where a signal
    came while encoding; EncodeOnceError where too many samples are rejected.
    """
    silence_decoders()
    root, acts = config.root, acts or Acts()
    refuse_foreign_folder(root, "cache")
    source = open_source(config.source)
    encoder = load_encoder(config.encoder, config.image.range)
    samples = source.samples()
    found = make_plan(samples)
    make_spec = partial(spec_of, config, array_spec(config, encoder))
    refuse_missing_images(found, config.source, config.run.max_reject_fraction)
    with claim(root):
        if has_cache(root):
            work = go_on(config, make_spec, source, found, acts)
        else:
            work = begin(config, make_spec(found), found)
            if told := str(samples.passed_over):  # now, as the encoding may take days
                say(told)
        del found  # the plan is on disk now; nothing below grows with the data set
        try:
            progress = build_missing(config, work, source, encoder, acts)
        except TooManyRejectsError as error:
            raise too_many(error, root, work.spec, acts) from None
        if progress.all_rejected:
            refuse_all_rejected(root, work.spec, acts)
        clear_leftovers(root, work.spec)
        seal = seal_cache(root, work.spec)
        announce_identity(work, seal)
        return summarise(work, progress, seal, samples.passed_over)


def build_missing(config: BuildConfig, work: Work, source: Source, encoder: Encoder, acts: Acts) -> BuildProgress:
    """Build every shard that is not kept; what was done, and how fast.

    The seal stays where shards have to come out as it says: mending that stops halfway has forgotten nothing.
    """
    with BuildProgress(work.spec.rows, work.kept, config.run.max_reject_fraction) as progress:
        progress.refuse_too_many_rejects()
        if work.missing:
            if work.samples_differ or not work.expected:
                unseal(config.root)
            stop = threading.Event()
            with stop_on_signals(stop.set):  # here, threads and processes have to be told; elsewhere, we are unwound
                run_local(config, work.spec, source, encoder, work.missing, work.expected, stop, progress)
            refuse_other_shards(config.root, progress.others, work.expected, acts)
            if stop.is_set():  # too late for the encoder to notice
                raise Interrupted("every shard is committed; run the same command again to seal the cache")
    return progress


def announce_identity(work: Work, seal: Seal) -> None:
    """A sealed cache that is another one now."""
    if work.earlier_seal is None or work.earlier_seal.identity == seal.identity:
        return
    others = "its samples are others, so that training begins anew"
    why = others if work.samples_differ else "the seal was not that of these shards"
    say(f"the cache's identity was {work.earlier_seal.identity} and is {seal.identity}: {why}")


def summarise(work: Work, progress: BuildProgress, seal: Seal, passed_over: PassedOver) -> Summary:
    before = work.retry.rejected_before if work.retry else {}
    return Summary(
        seal=seal,
        built_shards=progress.shards,
        built_images=progress.images,
        images_per_s=progress.images_per_s,
        waiting_share=progress.waiting_share,
        new_samples=work.new_samples,
        tried_again=work.retry.tried if work.retry else 0,
        recovered=sum(rejected - progress.rejected[shard] for shard, rejected in before.items()),
        passed_over=passed_over,
    )
