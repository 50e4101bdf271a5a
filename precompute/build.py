"""`precompute build` from plan to seal, and again from wherever it stopped.

Everything that can be refused is refused before anything is written.
"""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from cache_store.claim import claim, refuse_foreign_folder
from cache_store.command_line import stop_on_signals
from cache_store.errors import ConfigError, Interrupted, SourceError
from cache_store.metadata import clear_dead_scratch, has_cache, spec_problems, write_build, write_spec
from cache_store.plan import plan_digest
from cache_store.record import FORMAT_VERSION
from cache_store.schema import LATENTS, PLAN_FILE, ArraySpec, CommitRecord, Seal, Spec
from cache_store.seal import seal_cache
from precompute.acts import Acts
from precompute.config import BuildConfig
from precompute.decoder_messages import silence_decoders
from precompute.encoders.encoder import Encoder
from precompute.encoders.registry import load_encoder
from precompute.engines.local import run_local
from precompute.examine import examine_images
from precompute.expected import Expected, expected_shards
from precompute.extend import extend
from precompute.kept import find_kept, restore_metadata, sound_seal, unseal, write_plan_of
from precompute.plan import make_plan, some
from precompute.progress import BuildProgress, say
from precompute.rejections import refuse_all_rejected, too_many
from precompute.rejects import TooManyRejectsError
from precompute.retry import Retry, try_rejected
from precompute.sample_list import MakeSpec, SampleList, arrange
from precompute.sources import Source, SourceConfig, open_source
from precompute.sources.archive import MISSING
from precompute.stale import refuse_other_shards, refuse_other_spec


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


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is left to do, once everything has been compared and the cache's metadata stands."""

    spec: Spec
    kept: list[CommitRecord]
    """Of the shards that need no work."""
    expected: Expected = field(default_factory=dict)
    """What shards must come out as, where this is a repair."""
    earlier_seal: Seal | None = None
    """Of the cache, where it was sealed."""
    new_samples: int = 0
    retry: Retry | None = None

    @property
    def missing(self) -> list[int]:
        """The shards to build."""
        kept = {record.content.shard for record in self.kept}
        return [shard for shard in range(self.spec.num_shards) if shard not in kept]


def build(config: BuildConfig, acts: Acts | None = None) -> Summary:
    """Bring the cache to its sealed state; committed shards that fit are kept, but for what `acts` ask.

    Raises StaleError, with nothing touched, where the cache was made from other inputs; Interrupted where a signal
    came while encoding; EncodeOnceError where too many samples are rejected.
    """
    silence_decoders()
    root, acts = config.root, acts or Acts()
    refuse_foreign_folder(root, [LATENTS], "cache")
    source = open_source(config.source)
    encoder = load_encoder(config.encoder, config.image.range)
    found = make_plan(source.samples())
    make_spec = partial(spec_of, config, array_spec(config, encoder))
    refuse_missing_images(found, config.source, config.run.max_reject_fraction)
    with claim(root):
        clear_dead_scratch(root)
        if has_cache(root):
            work = go_on(config, make_spec, source, found, acts)
        else:
            work = begin(config, make_spec(found), found)
        del found  # the plan is on disk now; nothing below grows with the data set
        try:
            progress = build_missing(config, work, source, encoder, acts)
        except TooManyRejectsError as error:
            raise too_many(error, root, work.spec, acts) from None
        if progress.all_rejected:
            refuse_all_rejected(root, work.spec, acts)
        seal = seal_cache(root, work.spec)
        announce_identity(work, seal)
        return summarise(work, progress, seal)


def begin(config: BuildConfig, spec: Spec, found: pa.Table) -> Work:
    """Write a new cache's metadata."""
    write_build(config.root, config.recorded())
    write_plan_of(config.root, spec, found)
    write_spec(config.root, spec)
    return Work(spec=spec, kept=[])


def go_on(config: BuildConfig, make_spec: MakeSpec, source: Source, found: pa.Table, acts: Acts) -> Work:
    """Compare the cache with what is asked, all of it, before its metadata is mended or extended."""
    root, threads = config.root, config.run.threads(1)
    samples = arrange(config, found, make_spec, acts)
    spec = make_spec(samples.plan)
    refuse_other_spec(root, samples.cached, spec, acts)
    refuse_unknown_shards(root, spec, acts.rebuild)
    earlier_seal = sound_seal(root)
    expected = expected_shards(root, spec, samples.plan, earlier_seal) if acts.as_sealed else {}
    kept = find_kept(root, spec, samples.plan, without={samples.open_shard}, expected=expected)
    recipe = spec.arrays[LATENTS].image
    retry = try_rejected(root, kept.records, source, recipe, threads) if acts.retry_rejected else None
    again = {*acts.rebuild, *(retry.rejected_before if retry else ())}
    to_build = {*again, *kept.damaged}
    examine_images(root, samples, source, acts, again=to_build, expected=expected, threads=threads)
    for shard, problem in kept.damaged.items():
        say(f"damage found, shard {shard} is built again: {problem}")
    mend_or_extend(config, samples, spec)
    records = [record for record in kept.records if record.content.shard not in again]
    return Work(
        spec=spec,
        kept=records,
        expected=expected,
        earlier_seal=earlier_seal,
        new_samples=spec.rows - samples.cached.rows,
        retry=retry,
    )


def mend_or_extend(config: BuildConfig, samples: SampleList, spec: Spec) -> None:
    """Bring the metadata, the plan among it, to what the spec says."""
    if samples.grows:
        extend(config.root, config, samples, spec)
        return
    restore_metadata(config.root, config, spec)
    if samples.begun:
        say(f"an extension that had only begun is undone: {PLAN_FILE} is written again")
    elif samples.fingerprints is None:
        say(f"damage found, {PLAN_FILE} is written again from the source")
    else:
        return
    write_plan_of(config.root, spec, samples.to_write)


def build_missing(config: BuildConfig, work: Work, source: Source, encoder: Encoder, acts: Acts) -> BuildProgress:
    """Build every shard that is not kept; what was done, and how fast.

    The seal stays where shards have to come out as it says: a repair that stops halfway has forgotten nothing.
    """
    with BuildProgress(work.spec.rows, work.kept, config.run.max_reject_fraction) as progress:
        progress.refuse_too_many_rejects()
        if work.missing:
            if not acts.as_sealed:
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
    if work.new_samples or work.retry:
        why = "its samples are others, so that training begins anew"
    elif was_foreign(work, work.earlier_seal, seal):
        why = "the seal was not that of these shards"
    else:
        why = "rebuilt shards have other bytes"
    say(f"the cache's identity was {work.earlier_seal.identity} and is {seal.identity}: {why}")


def was_foreign(work: Work, before: Seal, seal: Seal) -> bool:
    """Whether the earlier seal was at fault: shards are kept that it was not made of, or all came out as expected."""
    sealed, now = set(before.commits.get(LATENTS, ())), seal.commits[LATENTS]
    if any(now[record.content.shard] not in sealed for record in work.kept):
        return True
    return bool(work.missing) and all(shard in work.expected for shard in work.missing)


def summarise(work: Work, progress: BuildProgress, seal: Seal) -> Summary:
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
    )


def refuse_unknown_shards(root: Path, spec: Spec, shards: Collection[int]) -> None:
    if beyond := sorted(shard for shard in shards if not 0 <= shard < spec.num_shards):
        raise ConfigError(f"{root} has shards [0, {spec.num_shards}); it has no shard {beyond[0]}")


def refuse_missing_images(found: pa.Table, source: SourceConfig, allowed: float) -> None:
    """Known before anything is encoded: a wrong folder should not cost an hour."""
    missing = found.filter(pc.equal(found["fingerprint"], MISSING))
    if missing.num_rows > allowed * found.num_rows:
        where = source.images or (Path(source.path).parent if source.kind == "llava" else source.path)
        names = some([uri or "(the record names none)" for uri in missing["uri"].to_pylist()])
        raise SourceError(
            f"{missing.num_rows} of {found.num_rows} samples have no image: {names}; looked in {where}. That is more "
            f"than run.max_reject_fraction {allowed:g} allows; nothing was encoded. Set source.images, or mend it"
        )


def array_spec(config: BuildConfig, encoder: Encoder) -> ArraySpec:
    return ArraySpec(
        shape=encoder.latent_shape(config.image.height, config.image.width),
        dtype=config.store.dtype,
        codec=config.store.codec,
        image=config.image.recipe,
        encoder=encoder.identity,
    )


def spec_of(config: BuildConfig, array: ArraySpec, plan: pa.Table) -> Spec:
    """The spec of a cache that holds `plan`; ConfigError, before anything is written, where no cache can be so."""
    spec = Spec(
        format_version=FORMAT_VERSION,
        store_format=config.store.format,
        rows=plan.num_rows,
        samples_per_shard=config.store.samples_per_shard,
        plan_digest=plan_digest([plan]),
        arrays={LATENTS: array},
    )
    if problems := spec_problems(spec):
        raise ConfigError(f"no cache can hold {plan.num_rows:,} samples of this size: {'; '.join(problems)}")
    return spec
