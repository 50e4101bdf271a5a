"""The `clip:` section of a build's config, and which clips of a video it asks for. Needs no decoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cache_store.errors import ConfigError
from cache_store.format.array import MAX_SIDE, ClipRecipe

HIGHEST_FPS = 1_000


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """Samples are clips of videos instead of images, if `frames` is set."""

    frames: int | list[int] | None = None
    """Frames of a clip, as the encoder takes them: 4k + 1 for Wan and HunyuanVideo, 6k + 1 for Mochi, 8k + 1 for LTX
    and CogVideoX. null: samples are images. A list: a video gets the largest of the numbers that it has frames for."""
    fps: float | Literal["source"] | None = None
    """Frames per second of a clip, whatever the video has: 16 for Wan 2.1, 24 for Wan 2.2 5B and HunyuanVideo. A frame
    is the one that the video shows at that time. source: every frame of the video, in turn."""
    pick: Literal["head", "middle", "chunk", "slide"] = "head"
    """head: one clip from the video's beginning. middle: one from its middle. chunk: clips one after the other; a rest
    that is shorter is left out. slide: one every `stride` frames. musubi-tuner has head, chunk and slide,
    diffusion-pipe calls head single_beginning and middle single_middle."""
    stride: int | None = None
    """For slide: frames, at the clip's fps, from a clip's beginning to the next one's."""

    def __post_init__(self) -> None:
        if self.frames is None:
            return
        for count in self.counts:
            if not 1 <= count <= MAX_SIDE:
                raise ConfigError(f"clip.frames must be in [1, {MAX_SIDE:,}], got {count:,}")
        if not self.counts or [*self.counts] != sorted({*self.counts}):
            raise ConfigError(f"clip.frames must be a number, or several in ascending order, got {self.frames}")
        if self.fps is None:
            raise ConfigError(
                "clip.fps is missing: 16 for Wan 2.1, 24 for Wan 2.2 5B and HunyuanVideo; source takes every frame"
            )
        if self.fps != "source" and not 0 < self.fps <= HIGHEST_FPS:
            raise ConfigError(f"clip.fps must be above 0 and at most {HIGHEST_FPS:,}, or source, got {self.fps:g}")
        if self.pick == "slide" and self.stride is None:
            raise ConfigError("clip.stride is missing: the frames from a clip's beginning to the next one's")
        if self.stride is not None and self.pick != "slide":
            raise ConfigError("clip.stride has no effect without clip.pick: slide; leave it out")
        if self.stride is not None and self.stride < 1:
            raise ConfigError(f"clip.stride must be at least 1, got {self.stride}")

    @property
    def is_on(self) -> bool:
        return self.frames is not None

    @property
    def counts(self) -> Sequence[int]:
        return self.frames if isinstance(self.frames, list) else [] if self.frames is None else [self.frames]

    @property
    def rate(self) -> float | None:
        return None if self.fps in (None, "source") else float(self.fps)

    @property
    def recipe(self) -> ClipRecipe:
        return ClipRecipe(counts=tuple(self.counts), fps=self.rate)

    def first_frames(self, available: int) -> Sequence[int]:
        """Return where the clips of a video with this many frames, at the clip's fps, begin; [0] if it is too short."""
        length = count_for(self.counts, available)
        if length is None or self.pick == "head":
            return [0]
        if self.pick == "middle":
            return [(available - length) // 2]
        return range(0, available - length + 1, self.stride or length)


def count_for(counts: Sequence[int], available: int) -> int | None:
    """Return the largest of these numbers of frames that a video has; None if it is too short for all."""
    return max((count for count in counts if count <= available), default=None)
