"""Whether the images are still the ones encoded: refused where a latent depends on one that is not."""

from collections.abc import Collection
from pathlib import Path

from precompute.encode.progress import say
from precompute.plan import some
from precompute.resume.expected import Expected
from precompute.resume.image_changes import ImageChange, check_images
from precompute.resume.request import Acts
from precompute.resume.sample_list import SampleList
from precompute.resume.stale import refuse_changed_images, refuse_changed_rejects, refuse_unknown_images
from precompute.sources import Source


def examine_images(
    root: Path,
    samples: SampleList,
    source: Source,
    acts: Acts,
    *,
    again: Collection[int],
    expected: Expected,
    threads: int,
) -> None:
    """StaleError naming changed images; of rejected ones only in the shards `again`, whose bytes are to come out.

    Of shards that are built again every image is read, however it looks: a new latent would hide that it changed.
    """
    trusted = None if acts.check_sources else samples.fingerprints
    whole = {*again, *(() if samples.open_shard is None else (samples.open_shard,))}
    check = check_images(root, samples.cached, source, trusted, samples.plan, threads, whole, expected)
    encoded = [change for change in check.changes if not change.rejected]
    refuse_changed_images(root, samples.cached.rows, encoded, acts)
    if acts.check_sources:
        refuse_unknown_images(root, check.unknown)
        say(f"{check.compared:,} images were read again; all that are encoded have the bytes that were encoded")
    if not acts.retry_rejected:
        rejected = [change for change in check.changes if change.rejected]
        refuse_changed_rejects(root, [change for change in rejected if change.shard in again], acts)
        announce_rejected(rejected, samples.open_shard, acts)


def announce_rejected(changes: list[ImageChange], open_shard: int | None, acts: Acts) -> None:
    """Rejected samples that might succeed now; those of the shard that an extension writes again are tried anyway."""
    if tried := [change.id for change in changes if change.shard == open_shard]:
        say(f"rejected images that have changed, in the shard that is written again: {len(tried):,} ({some(tried)})")
    changes = [change for change in changes if change.shard != open_shard]
    back = [change.id for change in changes if change.before is None]
    other = [change.id for change in changes if change.before is not None]
    for ids, what in ((back, "were missing and are there now"), (other, "were rejected and have changed")):
        if ids:
            flag = acts.with_options("--retry-rejected")
            say(f"images that {what}: {len(ids):,} ({some(ids)}); they stay rejected, unless you run {flag}")
