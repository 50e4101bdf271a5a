"""Make the rows of a cache of clips: each video of a source gives one clip or several.

Only a video's first and last bytes are read, to learn its length. A rerun takes the clips of unchanged videos from the
plan. A source whose samples have `clip_start` already, such as another cache of clips, says itself which clips it has.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

from cache_store.errors import SourceError
from cache_store.format.plan import PlanFile
from cache_store.format.tables import CLIP_START
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.daemon_threads import map_concurrently
from cache_store.storage.store import Store
from precompute.clips.config import ClipConfig, count_for
from precompute.clips.video import MAX_SECONDS, Video, probe_video
from precompute.images.rejected import Rejected
from precompute.rerun.image_sizes import ImageSizes
from precompute.sources import Source
from precompute.sources.image_store import stream_opener
from precompute.sources.listing import Samples
from precompute.sources.place import MISSING, Place, planned_place

VIDEOS_AT_ONCE = 256
"""Videos looked at together; many are opened at the same time."""


@dataclass(frozen=True)
class PlannedClips:
    """The clips that a plan has of one video."""

    uri: str
    fingerprint: str | None
    rows: list[tuple[str, float]]
    """Id and start of each clip."""


def with_clips(
    samples: Samples, source: Source, config: ClipConfig, max_pixels: int, planned: PlanFile | None = None
) -> Samples:
    """Return the clips of these videos; `planned` is a plan that was made with the same config."""
    if CLIP_START in samples.extra:
        return replace(samples, each=with_checked_starts(samples), captioned=Counter())
    known = clips_in_plan(planned, config) if planned else {}
    clips = ClipLister(VideoProbes(source, max_pixels), config, known).clips(samples)
    return replace(samples, each=clips, captioned=Counter(), extra=(*samples.extra, CLIP_START))


def with_checked_starts(samples: Samples) -> Iterator[dict[str, object]]:
    """Yield samples that say themselves where their clips begin; raise SourceError for one that does not."""
    for sample in samples:
        extra: Any = sample.get("extra") or {}
        start = extra.get(CLIP_START)
        if sample["conversations"] is not None:  # not withdrawn
            if isinstance(start, bool) or not isinstance(start, int | float) or not 0 <= start <= MAX_SECONDS:
                raise SourceError(
                    f"source.fields.extra: {CLIP_START} of {sample['id']} is "
                    f"{'missing' if start is None else repr(start)}, expected seconds in "
                    f"[0, {MAX_SECONDS:,}]"
                )
            start = float(start)
        yield {**sample, "extra": {**extra, CLIP_START: start}}


class VideoProbes:
    """Learns length and size of videos; the answers about the last ones are kept."""

    def __init__(self, source: Source, max_pixels: int) -> None:
        self._open, self._max_pixels = stream_opener(source), max_pixels
        self._probed = lru_cache(VIDEOS_AT_ONCE)(self._probe)

    def of(self, row: Mapping[str, Any]) -> Video | None:
        """Look at the video of a row that has uri, fingerprint and place; None if it cannot be read."""
        if row["fingerprint"] in (MISSING, None):  # None of a withdrawn sample
            return None
        return self._probed(row["uri"], planned_place(row["place"]))

    def _probe(self, uri: str, place: Place | None) -> Video | None:
        try:
            with self._open(uri, place) as stream:
                return probe_video(stream, self._max_pixels)
        except Rejected:
            return None


class ClipLister:
    """Lists the clips of a source's videos."""

    def __init__(self, probes: VideoProbes, config: ClipConfig, known: Mapping[str, PlannedClips]) -> None:
        self._probes, self._config, self._known = probes, config, known

    def clips(self, samples: Samples) -> Iterator[dict[str, object]]:
        """Yield a sample for each clip, those of a video together and in order."""
        videos = iter(samples)
        with ProgressBar("videos", None, "video") as bar:
            while block := [*islice(videos, VIDEOS_AT_ONCE)]:
                for video, rows in zip(block, map_concurrently(self._rows, block), strict=True):
                    extra: Any = video.get("extra") or {}
                    for name, start in rows:
                        yield {**video, "id": name, "extra": {**extra, CLIP_START: start}}
                bar.update(len(block))

    def _rows(self, video: Mapping[str, Any]) -> Sequence[tuple[str, float]]:
        """Return id and start of each clip of a video; a video that cannot be read has one, and is rejected later."""
        name, held = video["id"], self._known.get(video["id"])
        if held and (held.uri, held.fingerprint) == (video["uri"], video["fingerprint"]):
            return held.rows
        if (facts := self._probes.of(video)) is None:
            return [(clip_id(name, self._config, 0), 0.0)]
        rate = self._config.rate or facts.rate
        firsts = self._config.first_frames(facts.num_frames(self._config.rate))
        return [(clip_id(name, self._config, first), first / rate if first else 0.0) for first in firsts]


class ClipSizes(ImageSizes):
    """Reads sizes of clips: width and height of the video, and the frames of the clip's bucket."""

    columns = ("uri", "fingerprint", "place", CLIP_START)
    unknown = (0, 0, 0)

    def __init__(self, source: Source, store: Store | None, max_pixels: int, config: ClipConfig) -> None:
        super().__init__(source, store, max_pixels, threads=1)
        self._probes, self._config = VideoProbes(source, max_pixels), config
        self._rule = (max_pixels, config.counts, config.rate)

    def _of_image(self, row: dict[str, Any]) -> tuple[int, ...]:
        if (facts := self._probes.of(row)) is None:
            return self.unknown
        rate = self._config.rate or facts.rate
        left = facts.num_frames(self._config.rate) - round(row[CLIP_START] * rate)
        frames = count_for(self._config.counts, left)
        return self.unknown if frames is None else (facts.width, facts.height, frames)


def clip_id(video: str, config: ClipConfig, first: int) -> str:
    """Return a clip's id: the video's, and where one video may have several clips, the clip's first frame."""
    return video if config.pick in ("head", "middle") else f"{video}@{first}"


def clips_in_plan(plan: PlanFile, config: ClipConfig) -> dict[str, PlannedClips]:
    """Return the clips that a plan has of each video, by the video's id; a video with a withdrawn clip is left out."""
    found, incomplete = dict[str, PlannedClips](), set[str]()
    for shard in range(plan.num_shards):
        for row in plan.shard(shard, ["id", "uri", "fingerprint", CLIP_START]).to_pylist():
            video = row["id"] if config.pick in ("head", "middle") else row["id"].rpartition("@")[0]
            held = found.setdefault(video, PlannedClips(row["uri"], row["fingerprint"], []))
            if row[CLIP_START] is None or (held.uri, held.fingerprint) != (row["uri"], row["fingerprint"]):
                incomplete.add(video)
                continue
            held.rows.append((row["id"], row[CLIP_START]))
    return {video: held for video, held in found.items() if video not in incomplete}
