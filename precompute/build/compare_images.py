"""Check that images are still the encoded ones, by the SHA-256 in the samples tables, and retry rejected ones."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_store.cache.survey import Survey
from cache_store.format.array import ArraySpec
from cache_store.format.layout import samples_file
from cache_store.format.tables import REJECTED, WITHDRAWN, reason_kind
from cache_store.messages import ABSENT, Difference, abridge, counted
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.store import Store
from cache_store.verify.record import recorded_samples
from precompute.build.decide import Work
from precompute.build.refusals import refuse_changed_images, refuse_damage
from precompute.build.request import BuildRequest
from precompute.build.stated import Planned
from precompute.images.rejected import Rejected
from precompute.inputs import Reader
from precompute.inputs.reader import read_one


class ImageChange(NamedTuple):
    """A sample whose image changed since its shard was built."""

    shard: int
    is_rejected: bool
    """Whether the sample was rejected; then no latent depends on the image, and a retry may succeed."""
    difference: Difference
    """The sample's id, and before and now: its content SHA-256, ABSENT, or why it cannot be read."""


def compare_images(
    survey: Survey, work: Work, rows: Planned, reader: Reader, request: BuildRequest, threads: int
) -> tuple[int, list[ImageChange]]:
    """Compare images with the encoded ones; return how many, and those that changed; CacheError for a damaged table.

    It reads images whose fingerprint changed, and all of shards that are rebuilt: a new latent would hide a change.
    """
    compared, changes = 0, list[ImageChange]()
    counts = {shard: len(work.spec.shard_rows(shard)) for shard in shards_to_check(survey, work, rows, request)}
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="check") as pool,
        ProgressBar("check images", sum(counts.values()), "image") as bar,
    ):
        for shard, count in counts.items():
            is_trusted = shard in work.kept and not request.check_sources
            suspects = suspects_of(survey, work, rows, reader, shard, is_trusted=is_trusted)
            if suspects is None and not request.mends:  # a repair gives the shard its old bytes, or none
                refuse_damage(survey.store, [f"{samples_file(shard)} or its record is damaged"], request)
            changes += filter(None, pool.map(partial(compare_image, reader, shard), suspects or ()))
            compared += len(suspects or ())
            bar.update(count)
    return compared, changes


def shards_to_check(survey: Survey, work: Work, rows: Planned, request: BuildRequest) -> list[int]:
    """List the planned shards to check: not those never built, nor kept ones whose files did not move or change."""
    planned = range(work.spec.shard_of_row(work.rows_before - 1) + 1)
    built = survey.shards if survey.seal.is_absent else planned
    parts, are_all = work.spec.part_of_shard, request.check_sources
    return [
        shard
        for shard in planned
        if shard in built and (are_all or shard not in work.kept or int(parts[shard]) in rows.found)
    ]


def suspects_of(
    survey: Survey, work: Work, rows: Planned, reader: Reader, shard: int, *, is_trusted: bool
) -> list[dict[str, Any]] | None:
    """Return the encoded samples whose fingerprints changed, or all; None if no trusted table has them."""
    now = rows.of_shard(shard, ["fingerprint"])["fingerprint"]
    before = rows.fingerprints_before(shard) if is_trusted else None
    changed = pa.scalar(True) if before is None else pc.not_equal(pc.fill_null(before, ""), now)
    places = np.flatnonzero(pc.and_(now.is_valid(), changed).to_numpy()).tolist()  # a withdrawn sample has none
    samples = encoded_samples(survey, work, rows, reader, shard) if places else []
    return None if samples is None else [samples[place] for place in places]


def encoded_samples(
    survey: Survey, work: Work, rows: Planned, reader: Reader, shard: int
) -> list[dict[str, Any]] | None:
    """Return a shard's samples with their recorded SHA-256 and status; None without a trusted table."""
    record, task = survey.records.get(shard), work.tasks.get(shard)
    if record is None or (task and task.digest not in ("", record.content.digest)):
        return None
    samples = recorded_samples(survey.store, record, ["id", "content_sha256", "status"])
    planned = rows.of_shard(shard, [*{"id": None, **dict.fromkeys(reader.columns)}])
    if samples is None or not samples["id"].equals(planned["id"]):
        return None
    return [{**row, **sample} for row, sample in zip(planned.to_pylist(), samples.to_pylist(), strict=True)]


def compare_image(reader: Reader, shard: int, sample: dict[str, Any]) -> ImageChange | None:
    """Compare a sample's image with the encoded one; return None if it is unchanged."""
    before = sample["content_sha256"]
    try:
        now, readable = reader.digest(sample), True
    except Rejected as rejected:
        now, readable = reason_kind(rejected.reason), False
    if now == before or (before is None and not readable):
        return None
    difference = Difference(sample["id"], before or ABSENT, now)
    return ImageChange(shard, sample["status"] == REJECTED, difference)


def judge_images(
    store: Store,
    work: Work,
    compared: int,
    changes: Sequence[ImageChange],
    request: BuildRequest,
) -> tuple[Work, frozenset[int]]:
    """Raise StaleError naming changed images; no latent depends on a rejected one.

    Returns the work with notes, and the parts whose fingerprints have to stay, so that the next build looks again.
    """
    encoded = [each.difference for each in changes if not each.is_rejected]
    what = f"{len(encoded):,} of {work.rows_before:,} images changed since they were encoded"
    another = request.with_options("--cache", "NEW")
    refuse_changed_images(store, what, encoded, f"to encode them as they are now, build another cache: {another}")
    notes = list[str]()
    if request.check_sources:
        notes.append(f"{counted(compared, 'image')} read again; every encoded image is unchanged")
    rejected = [each for each in changes if each.is_rejected and not request.retry_rejected]
    held, retry = (
        [each.difference for each in rejected if each.shard not in work.kept],
        request.with_options("--retry-rejected"),
    )
    what = f"{counted(len(held), 'rejected image')} changed, in shards that are to be built again"
    refuse_changed_images(store, what, held, f"to build the shards with the images as they are: {retry}")
    if ids := [each.difference.field for each in rejected]:
        notes.append(
            f"images that were rejected are there now, or have changed: {len(ids):,} ({abridge(ids)}); they stay "
            f"rejected, unless you run {retry}"
        )
    shards = *(each.shard for each in rejected), *work.shards_to("mend")
    parts = frozenset(int(work.spec.part_of_shard[shard]) for shard in shards)
    return replace(work, notes=(*notes, *work.notes)), parts


def retry_rejected(store: Store, work: Work, rows: Planned, reader: Reader, threads: int) -> Work:
    """Read and fit the rejected samples of kept shards; return the work with those in which one can be decoded now."""
    tried, again = 0, dict[int, int]()
    contents = {shard: record.content for shard, record in work.kept.items()}
    counts = {
        shard: each.rejected - each.reasons.get(WITHDRAWN, 0)
        for shard, each in contents.items()
        if each.reasons.keys() - {WITHDRAWN}
    }
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="retry") as pool,
        ProgressBar("retry", sum(counts.values()), "image") as bar,
    ):
        for shard in counts:
            samples = recorded_samples(store, work.kept[shard], ["status", "reason"])
            if samples is None:
                continue  # damaged; `cache-store verify` reports it
            planned = rows.of_shard(shard, reader.columns)
            is_tried = pc.and_(pc.equal(samples["status"], REJECTED), pc.not_equal(samples["reason"], WITHDRAWN))
            rejected = planned.filter(is_tried).to_pylist()
            outcomes = list(pool.map(partial(is_decodable, reader, work.spec.array_of(shard)), rejected))
            tried += len(outcomes)
            if any(outcomes):
                again[shard] = contents[shard].rejected
            bar.update(len(outcomes))
    return work.with_recovered(tried, again)


def is_decodable(reader: Reader, array: ArraySpec, sample: dict[str, Any]) -> bool:
    _, outcome = read_one(reader, sample, array)
    return outcome.reason is None
