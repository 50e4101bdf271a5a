"""List the clips of a source's videos, one or several of each.

A rerun takes the clips of unchanged videos from the plan. A source whose samples have `clip_start` already, such as
another cache of clips, lists its own clips.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa

from cache_store.errors import SourceError
from cache_store.format.tables import CLIP_START, WITHDRAWN
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.threads import map_concurrently
from precompute.clips.config import ClipConfig
from precompute.clips.video import MAX_SECONDS, Video
from precompute.sources.listing import Samples

VIDEOS_AT_ONCE = 256

Probe = Callable[[Mapping[str, Any]], Video | None]
"""Looks at the video of a row that has uri, fingerprint and place; None if it cannot be read."""


class PlannedClips(NamedTuple):
    """The clips that a plan has of one video."""

    of: tuple[str, str | None]
    rows: list[tuple[str, float]]
    """Id and start of each clip."""


def with_checked_starts(samples: Samples) -> Iterator[dict[str, object]]:
    """Yield samples that say where their clips begin; raise SourceError for one that does not."""
    for sample in samples:
        extra: Any = sample.get("extra") or {}
        start = extra.get(CLIP_START)
        if sample["conversations"] is not None:  # not withdrawn
            if isinstance(start, bool) or not isinstance(start, int | float) or not 0 <= start <= MAX_SECONDS:
                raise SourceError(
                    f"source.fields.extra: {CLIP_START} of {sample['id']} must be seconds in [0, {MAX_SECONDS:,}], "
                    f"got {start!r}"
                )
            start = float(start)
        yield {**sample, "extra": {**extra, CLIP_START: start}}


def list_clips(
    samples: Samples, config: ClipConfig, probe: Probe, known: Mapping[str, PlannedClips]
) -> Iterator[dict[str, object]]:
    """Yield a sample for each clip, those of a video together and in order."""

    def rows_of(video: Mapping[str, Any]) -> Sequence[tuple[str, float]]:
        """Return id and start of each clip; a video that cannot be read has one, and is rejected later."""
        name, held = video["id"], known.get(video["id"])
        if held and held.of == (video["uri"], video["fingerprint"]):
            return held.rows
        if (facts := probe(video)) is None:
            return [(clip_id(name, config, 0), 0.0)]
        firsts, rate = config.first_frames(facts.num_frames(config.rate)), config.rate or facts.rate
        return [(clip_id(name, config, first), first / rate if first else 0.0) for first in firsts]

    videos = iter(samples)
    with ProgressBar("videos", None, "video") as bar:
        while block := [*islice(videos, VIDEOS_AT_ONCE)]:
            for video, rows in zip(block, map_concurrently(rows_of, block), strict=True):
                extra: Any = video.get("extra") or {}
                for name, start in rows:
                    yield {**video, "id": name, "extra": {**extra, CLIP_START: start}}
            bar.update(len(block))


def clip_id(video: str, config: ClipConfig, first: int) -> str:
    return video if config.pick in ("head", "middle") else f"{video}@{first}"


def clips_in_plan(planned: Iterable[pa.Table], config: ClipConfig) -> dict[str, PlannedClips]:
    """Return a plan's clips by the video's id; a video with a withdrawn clip is left out."""
    found, incomplete = dict[str, PlannedClips](), set[str]()
    for part in planned:
        for row in part.select(["id", "uri", "fingerprint", "state", CLIP_START]).to_pylist():
            video = row["id"] if config.pick in ("head", "middle") else row["id"].rpartition("@")[0]
            held = found.setdefault(video, PlannedClips(of := (row["uri"], row["fingerprint"]), []))
            if row["state"] == WITHDRAWN or held.of != of:
                incomplete.add(video)
            held.rows.append((row["id"], row[CLIP_START]))
    return {video: held for video, held in found.items() if video not in incomplete}
