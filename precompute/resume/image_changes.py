"""Finding images that are no longer the ones a cache encoded, by the SHA-256 that its samples tables remember."""

from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from cache_store.cache.writer import OtherShardError
from cache_store.errors import CacheError
from cache_store.format.schema import REJECTED, SEAL_FILE, Spec, commit_file, reason_kind, samples_file
from cache_store.format.tables import read_table
from cache_store.program.progress_bar import progress_bar
from cache_store.refusal import ABSENT, Difference
from precompute.images.decode import content_sha256
from precompute.images.rejected import Rejected
from precompute.resume.remembered import remembered_samples
from precompute.sources import Source


@dataclass(frozen=True, kw_only=True)
class ImageChange:
    """A sample whose image is another than when its shard was built."""

    id: str
    shard: int
    rejected: bool
    """Then no latent depends on the image, and the sample may succeed if it is tried again."""
    before: str | None
    """Content SHA-256; None where there was nothing to read."""
    now: str
    """Content SHA-256, or why there is nothing to read."""


@dataclass(frozen=True)
class ImageCheck:
    """What a check read, and found."""

    compared: int
    changes: list[ImageChange]
    unknown: list[int]
    """Shards that were built and whose images may have changed, but whose samples tables cannot be trusted."""


def check_images(
    root: Path,
    spec: Spec,
    source: Source,
    before: pa.ChunkedArray | None,
    now: pa.Table,
    threads: int,
    whole: Container[int],
    expected: Mapping[int, Container[str]],
) -> ImageCheck:
    """Read images of committed shards and compare them with the samples tables.

    Of images whose fingerprint in `before` (a file's size and time, a zip member's crc) is the one in `now`, none
    is read; all are where `before` is None, and those of the shards `whole`. Nothing is compared with the tables of
    shards whose records or tables are damaged, or are not among those `expected` of them.
    """
    compared, changes, unknown = 0, [], []
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="check") as pool,
        progress_bar(total=spec.rows, desc="check images", unit="image", delay=0.5) as bar,
    ):
        for shard in range(spec.num_shards):
            rows = spec.shard_rows(shard)
            planned = now.slice(rows.start, len(rows))
            trusted = None if before is None or shard in whole else before.slice(rows.start, len(rows))
            looked_changed = suspects(planned, trusted)
            samples = encoded_samples(root, shard, planned, expected.get(shard)) if looked_changed else []
            chosen = [samples[place] for place in looked_changed] if samples else []
            unknown += [shard] if looked_changed and not samples and was_built(root, shard) else []
            for change in pool.map(lambda sample: compare(source, shard, sample), chosen):  # noqa: B023 (used at once)
                changes += [change] if change else []
                bar.update()
            compared += len(chosen)
            bar.update(len(rows) - len(chosen))
    return ImageCheck(compared, changes, unknown)


def was_built(root: Path, shard: int) -> bool:
    return (root / commit_file(shard)).exists() or (root / SEAL_FILE).exists()


def suspects(planned: pa.Table, before: pa.ChunkedArray | None) -> list[int]:
    """Places, in the shard, of samples that may have changed."""
    now = planned["fingerprint"].to_pylist()
    if before is None:
        return list(range(len(now)))
    return [place for place, (was, is_now) in enumerate(zip(before.to_pylist(), now, strict=True)) if was != is_now]


def encoded_samples(root: Path, shard: int, planned: pa.Table, expected: Container[str] | None) -> list[dict[str, Any]]:
    """The planned samples of a shard, with what was encoded; none where nothing that can be trusted remembers it."""
    samples = remembered_samples(root, shard, ["id", "uri", "content_sha256", "status"], expected)
    return samples.to_pylist() if samples is not None and samples["id"].equals(planned["id"]) else []


def compare(source: Source, shard: int, sample: dict[str, Any]) -> ImageChange | None:
    """How a sample's image has changed; None where it has not."""
    remembered = sample["content_sha256"]
    try:
        now = content_sha256(source.read(sample["uri"]))
        readable = True
    except Rejected as rejected:
        now, readable = reason_kind(rejected.reason), False
    if now == remembered or (remembered is None and not readable):
        return None
    rejected_then = sample["status"] == REJECTED
    return ImageChange(id=sample["id"], shard=shard, rejected=rejected_then, before=remembered, now=now)


@dataclass(frozen=True, kw_only=True)
class OtherShard:
    """A shard that came out another one than expected."""

    shard: int
    digest: str
    """Of the content that it would have had."""
    changes: list[Difference]
    """Samples that are not what they were, as far as the samples table still says."""


def other_shard(root: Path, shard: int, error: OtherShardError) -> OtherShard:
    return OtherShard(shard=shard, digest=error.digest, changes=list(sample_changes(root, shard, error.samples)))


def sample_changes(root: Path, shard: int, now: pa.Table) -> Iterator[Difference]:
    """How samples differ from the table on disk, which may be damaged: it names them, and decides nothing."""
    columns = ["id", "content_sha256", "status", "reason"]
    try:
        before = read_table(root / samples_file(shard), columns)
    except CacheError:
        return
    if before["id"].equals(now["id"]):
        for was, is_now in zip(before.to_pylist(), now.select(columns).to_pylist(), strict=True):
            if was["content_sha256"] != is_now["content_sha256"]:
                digests = (each["content_sha256"] or ABSENT for each in (was, is_now))
                yield Difference(f"image of {was['id']}", *digests)
            elif was["status"] != is_now["status"]:
                yield Difference(f"sample {was['id']}", *(each["reason"] or each["status"] for each in (was, is_now)))
