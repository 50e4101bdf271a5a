"""Whether the images are still the ones encoded, by the SHA-256 that the samples tables hold."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cache_store.cache.files import read_samples
from cache_store.cache.survey import Survey
from cache_store.errors import CacheError
from cache_store.format.names import samples_file
from cache_store.format.schema import CommitRecord
from cache_store.format.tables import MAX_ROW_GROUP_BYTES, REJECTED, parse_table, reason_kind
from cache_store.log import log_info
from cache_store.program.progress_bar import progress_bar
from cache_store.refusal import ABSENT, Difference, counted, printable
from cache_store.storage.store import Store
from precompute.encode.job import MismatchedShard
from precompute.images.decode import content_sha256
from precompute.images.rejected import Rejected
from precompute.plan.ids import abridged
from precompute.resume.decide import Work
from precompute.resume.refusals import refuse_changed_images, refuse_changed_rejects, refuse_unknown_images
from precompute.resume.request import BuildRequest
from precompute.sources import Source


@dataclass(frozen=True, kw_only=True)
class ImageChange:
    """A sample whose image is another than when its shard was built."""

    shard: int
    rejected: bool
    """Then no latent depends on the image, and the sample may succeed if it is tried again."""
    difference: Difference
    """By id: content SHA-256, or that there was nothing to read, and why there is nothing now."""


def examine_images(survey: Survey, work: Work, source: Source, request: BuildRequest, threads: int) -> bool:
    """StaleError naming changed images; of rejected ones only in shards that must come out as they were.

    Returns whether rejected ones have changed and are not tried again.

    It reads images whose fingerprint (a file's size and time, a zip member's crc) is not the planned one, and all those
    of shards that are built again, however they look: a new latent would hide that an image changed.
    """
    if not survey.has_cache:
        return False
    store, compared, changes, unknown = survey.store, 0, list[ImageChange](), list[int]()
    before, size = None if request.check_sources else work.trusted, work.spec.samples_per_shard
    rows = {shard: min(size, work.rows_before - shard * size) for shard in shards_to_look_at(survey, work)}
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="check") as pool,
        progress_bar(total=sum(rows.values()), desc="check images", unit="image", delay=0.5) as bar,
    ):
        for shard, count in rows.items():
            now = work.planned(shard, ["fingerprint"]).slice(0, count)
            trusted = before.shard(shard, ["fingerprint"]) if before and shard in work.kept else None
            suspects = changed_places(now["fingerprint"], trusted and trusted["fingerprint"])
            samples = encoded_samples(survey, work, shard, now.num_rows) if suspects else None
            if samples is not None:
                chosen = [samples[place] for place in suspects]
                found = pool.map(lambda sample: compare(source, shard, sample), chosen)  # noqa: B023 (used at once)
                changes += filter(None, found)
                compared += len(chosen)
            elif suspects:
                unknown.append(shard)
            bar.update(now.num_rows)
    refuse_changed_images(store, work.rows_before, [each.difference for each in changes if not each.rejected], request)
    if request.check_sources:
        refuse_unknown_images(store, unknown)
        log_info(f"{counted(compared, 'image')} read again; all that are encoded have the bytes that were encoded")
    rejected = [each for each in changes if each.rejected and not request.retry_rejected]
    settle_rejected(store, rejected, work, request)
    return bool(rejected)


def shards_to_look_at(survey: Survey, work: Work) -> list[int]:
    """Of those planned before: none that was not built yet, or is kept of a source as it was."""
    planned = range(-(-work.rows_before // work.spec.samples_per_shard))
    built = survey.shards if survey.seal.is_absent else planned
    return [shard for shard in planned if shard in built and not (work.goes_by_own_plan and shard in work.kept)]


def changed_places(now: pa.ChunkedArray, before: pa.ChunkedArray | None) -> list[int]:
    """Places, in a shard, of samples whose fingerprints differ; all of them where none can be trusted."""
    if before is None:
        return list(range(len(now)))
    if before.equals(now):
        return []
    pairs = zip(before.to_pylist(), now.to_pylist(), strict=True)
    return [place for place, (was, is_now) in enumerate(pairs) if was != is_now]


def encoded_samples(survey: Survey, work: Work, shard: int, count: int) -> list[dict[str, Any]] | None:
    """The first planned samples of a shard, with what was encoded; None where nothing that can be trusted tells."""
    record, allowed = survey.records.get(shard), work.allowed_digests.get(shard)
    if record is None or (allowed is not None and record.content.digest not in allowed):
        return None
    samples = recorded_samples(survey.store, record, ["id", "content_sha256", "status"])
    planned = work.planned(shard, ["id", "uri"]).slice(0, count)
    if samples is None or not samples["id"].equals(planned["id"]):
        return None
    rows: list[dict[str, Any]] = samples.append_column("uri", planned["uri"]).to_pylist()
    return rows


def recorded_samples(store: Store, record: CommitRecord, columns: list[str]) -> pa.Table | None:
    """A shard's samples table; None where it is not, byte for byte, the one that the record names."""
    name = samples_file(record.content.shard)
    try:
        for file in (each for each in record.content.files if each.path == name):
            data = store.read(name, min(file.bytes, MAX_ROW_GROUP_BYTES))
            if hashlib.sha256(data).hexdigest() == file.sha256:
                return parse_table(data, store.where(name), columns)
    except (CacheError, FileNotFoundError):
        pass
    return None


def compare(source: Source, shard: int, sample: dict[str, Any]) -> ImageChange | None:
    """How a sample's image has changed; None where it has not."""
    before = sample["content_sha256"]
    try:
        now, readable = content_sha256(source.read(sample["uri"])), True
    except Rejected as rejected:
        now, readable = reason_kind(rejected.reason), False
    if now == before or (before is None and not readable):
        return None
    difference = Difference(sample["id"], before or ABSENT, now)
    return ImageChange(shard=shard, rejected=sample["status"] == REJECTED, difference=difference)


def settle_rejected(store: Store, changes: list[ImageChange], work: Work, request: BuildRequest) -> None:
    """Refuse, or name, rejected samples that might succeed now; an extension tries those of its open shard anyway."""
    held = [each.difference for each in changes if each.shard not in {*work.kept, work.open_shard}]
    refuse_changed_rejects(store, held, request)
    if tried := [each.difference.field for each in changes if each.shard == work.open_shard]:
        count = f"{len(tried):,} ({abridged(tried)})"
        log_info(f"rejected images that have changed, in the shard that is written again: {count}")
    rest = [each.difference for each in changes if each.shard != work.open_shard]
    back = [each.field for each in rest if each.before == ABSENT]
    changed = [each.field for each in rest if each.before != ABSENT]
    for ids, what in ((back, "were missing and are there now"), (changed, "were rejected and have changed")):
        if ids:
            flag = request.with_options("--retry-rejected")
            shown = printable(abridged(ids))
            log_info(f"images that {what}: {len(ids):,} ({shown}); they stay rejected, unless you run {flag}")


def sample_changes(store: Store, mismatched: MismatchedShard) -> Iterator[Difference]:
    """How samples differ from the table on disk, which may be damaged: it names them, and decides nothing."""
    try:
        before = read_samples(store, mismatched.shard, mismatched.samples.column_names)
    except CacheError:
        return
    if not before["id"].equals(mismatched.samples["id"]):
        return
    for was, now in zip(before.to_pylist(), mismatched.samples.to_pylist(), strict=True):
        if was["content_sha256"] != now["content_sha256"]:
            yield Difference(f"content of {was['id']}", *(each["content_sha256"] or ABSENT for each in (was, now)))
        elif was["status"] != now["status"]:
            yield Difference(f"sample {was['id']}", *(each["reason"] or each["status"] for each in (was, now)))
