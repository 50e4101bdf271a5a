"""`precompute build` from plan to seal, and again from wherever it stopped."""

import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from cache_store.errors import CacheError, ConfigError, SourceError
from cache_store.findings import Finding
from cache_store.formats import shard_format
from cache_store.metadata import (
    has_cache,
    read_build,
    read_commit,
    read_seal,
    read_spec,
    write_build,
    write_spec,
)
from cache_store.plan import PlanFile, plan_digest, read_plan, write_plan
from cache_store.publish import SCRATCH_SUFFIX, withdraw, write_file
from cache_store.schema import (
    BUILD_FILE,
    FORMAT_VERSION,
    PLAN_FILE,
    SEAL_FILE,
    ArraySpec,
    CommitRecord,
    Seal,
    Spec,
    commit_file,
)
from cache_store.seal import seal_cache
from cache_store.verify import metadata_findings
from cache_store.verify_shard import content_findings, file_finding
from precompute.claim import CLAIM_FILE, claim
from precompute.config import BuildConfig
from precompute.encoders import Encoder, load_encoder
from precompute.engines.local import run_local
from precompute.images import ignore_decoder_warnings
from precompute.pipeline import ARRAY
from precompute.plan import make_plan, some
from precompute.progress import BuildProgress
from precompute.sources import Source, open_source
from precompute.sources.image_store import MISSING
from precompute.stale import refuse_changed_images, refuse_other_plan, refuse_other_spec

OURS_BEFORE_THE_SPEC = {CLAIM_FILE, BUILD_FILE, PLAN_FILE}
"""What a build that died before its spec was written may leave, scratch files and empty folders aside."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a build did, and the cache it leaves."""

    seal: Seal
    built_shards: int
    built_images: int
    images_per_s: float
    waiting_share: float
    """Share of the encoder's time spent waiting for images."""


def build(config: BuildConfig, stop: threading.Event, rebuild: Collection[int] = ()) -> Summary:
    """Bring the cache to its sealed state; committed shards that fit are kept, but for those in `rebuild`.

    Raises StaleError, with nothing touched, where the cache was made from other inputs; Interrupted once `stop` is
    set; EncodeOnceError where too many samples are rejected.
    """
    ignore_decoder_warnings()
    root = config.root
    refuse_foreign_folder(root)
    source = open_source(config.source)
    encoder = load_encoder(config.encoder, config.image.range)
    found = make_plan(source.samples())
    spec = make_spec(config, encoder, found)
    with claim(root):
        prepared = prepare(root, config, spec, source, found)
        committed = [record for record in prepared if record.content.shard not in rebuild]
        del found  # the plan is on disk now; nothing below grows with the data set
        earlier = withdraw_seal(root) if len(committed) < spec.num_shards else None
        progress = build_missing(config, spec, source, encoder, committed, stop)
        seal = seal_cache(root, spec)
        if earlier not in (None, seal.identity):
            say(f"the cache's identity was {earlier} and is {seal.identity}: rebuilt shards have other bytes")
        return Summary(
            seal=seal,
            built_shards=progress.shards,
            built_images=progress.images,
            images_per_s=progress.images_per_s,
            waiting_share=progress.waiting_share,
        )


def build_missing(
    config: BuildConfig,
    spec: Spec,
    source: Source,
    encoder: Encoder,
    committed: list[CommitRecord],
    stop: threading.Event,
) -> BuildProgress:
    """Build every shard that is not in `committed`; what was done, and how fast."""
    done = {record.content.shard for record in committed}
    missing = [shard for shard in range(spec.num_shards) if shard not in done]
    with BuildProgress(spec.rows, committed, config.run.max_reject_fraction) as progress:
        progress.refuse_too_many_rejects()
        if missing:
            run_local(config, spec, source, encoder, missing, stop, progress)
    return progress


def withdraw_seal(root: Path) -> str | None:
    """Unseal a cache whose shards are to be built again; returns the identity it had."""
    try:
        identity = read_seal(root).identity
    except CacheError:
        identity = None
    withdraw(root / SEAL_FILE)
    return identity


def say(message: str) -> None:
    """What a person should know though the build goes on."""
    print(f"precompute: {message}", file=sys.stderr)


def refuse_foreign_folder(root: Path) -> None:
    """A folder that holds something else is never built into."""
    if root.exists() and not root.is_dir():
        raise ConfigError(f"cache: {root} is not a folder")
    if root.is_dir() and not has_cache(root):
        names = {path.name for path in root.iterdir() if not path.name.endswith(SCRATCH_SUFFIX)}
        if foreign := sorted(names - OURS_BEFORE_THE_SPEC - {ARRAY}):
            raise ConfigError(f"cache: {root} holds {foreign[0]!r} but no cache; name an empty or a new folder")


def make_spec(config: BuildConfig, encoder: Encoder, plan: pa.Table) -> Spec:
    image, store = config.image, config.store
    array = ArraySpec(
        shape=encoder.latent_shape(image.height, image.width),
        dtype=store.dtype,
        codec=store.codec,
        image=image.recipe,
        encoder=encoder.identity,
    )
    return Spec(
        format_version=FORMAT_VERSION,
        store_format=store.format,
        rows=plan.num_rows,
        samples_per_shard=store.samples_per_shard,
        plan_digest=plan_digest([plan]),
        arrays={ARRAY: array},
    )


def prepare(root: Path, config: BuildConfig, spec: Spec, source: Source, found: pa.Table) -> list[CommitRecord]:
    """Make the cache's metadata, or check that it fits; the records of the shards that need no work."""
    refuse_missing_images(found, config.run.max_reject_fraction)
    if not has_cache(root):
        write_build(root, config.recorded())
        write_plan_of(root, spec, found)
        write_spec(root, spec)
        return []
    cached = readable_spec(root, spec)
    if cached.plan_digest != spec.plan_digest:
        refuse_other_plan(root, read_plan(root), found)
    refuse_other_spec(root, cached, spec)
    plan = sound_plan(root, spec)
    if again := refuse_changed_images(root, spec, source, found, plan):
        say(f"{again} images that were missing are there now; their samples stay rejected in this cache")
    restore_metadata(root, config, spec)
    if plan is None:
        say(f"damage found, {PLAN_FILE} is written again from the source")
        write_plan_of(root, spec, found)
    return [record for shard in range(spec.num_shards) if (record := usable_record(root, spec, shard, found))]


def readable_spec(root: Path, asked: Spec) -> Spec:
    """The cache's spec; but the one asked for, if that is the sealed one: then the file was damaged since."""
    try:
        if read_seal(root).spec_digest == asked.digest:
            return asked
    except CacheError:
        pass  # not sealed yet, or the seal is damaged and made again from sound records
    return read_spec(root)


def refuse_missing_images(found: pa.Table, allowed: float) -> None:
    """Known before anything is encoded: a wrong folder should not cost an hour."""
    missing = found.filter(pc.equal(found["fingerprint"], MISSING))["id"]
    if len(missing) > allowed * found.num_rows:
        raise SourceError(
            f"{len(missing)} of {found.num_rows} samples have no image where the source says they are "
            f"({some(missing.to_pylist())}), more than run.max_reject_fraction {allowed:g} allows; nothing was encoded"
        )


def sound_plan(root: Path, spec: Spec) -> PlanFile | None:
    """The plan on disk, or None where it is lost or is not what spec and seal say."""
    try:
        if plan_digest([read_plan(root)]) != spec.plan_digest:
            return None
        plan = PlanFile(root)
    except CacheError:
        return None
    try:
        damaged = (root / SEAL_FILE).exists() and file_finding(root, read_seal(root).plan_file, "full")
    except CacheError as error:
        say(f"damage found, the seal is made again from the records: {error}")
        return plan
    return None if damaged else plan


def restore_metadata(root: Path, config: BuildConfig, spec: Spec) -> None:
    """Write again what the spec and the config determine and the folder lacks."""
    for finding in metadata_findings(root, spec):
        say(f"damage found and mended: {finding}")
        write_file(root / finding.file, shard_format(spec).metadata(spec)[finding.file])
    try:
        read_build(root)
    except CacheError as error:
        say(f"damage found and mended: {error}")
        write_build(root, config.recorded())


def write_plan_of(root: Path, spec: Spec, found: pa.Table) -> None:
    shards = map(spec.shard_rows, range(spec.num_shards))
    write_plan(root / PLAN_FILE, (found.slice(rows.start, len(rows)) for rows in shards))


def usable_record(root: Path, spec: Spec, shard: int, plan: pa.Table) -> CommitRecord | None:
    """A shard's record if the shard can be kept: it fits plan and spec, and its files have their sizes.

    Otherwise None: the shard is built again, and if it had been committed once, that is said aloud.
    """
    try:
        record = read_commit(root, ARRAY, shard)
        if record is None:
            return None
        findings = [*content_findings(spec, ARRAY, shard, record.content)]
        findings += [found for file in record.content.files if (found := file_finding(root, file, "quick", shard))]
        rows = spec.shard_rows(shard)
        if record.content.plan_digest != plan_digest([plan.slice(rows.start, len(rows))]):
            findings.append(Finding(shard=shard, file=commit_file(ARRAY, shard), problem="was made for other samples"))
        problem = str(findings[0]) if findings else None
    except CacheError as error:
        problem = str(error)
    if problem is None:
        return record
    say(f"damage found, shard {shard} is built again: {problem}")
    return None
