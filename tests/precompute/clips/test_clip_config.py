"""The `clip:` section: where the clips of a video begin, and what is refused."""

import re

import pytest

from cache_store.errors import ConfigError, SourceError
from precompute.clips.config import ClipConfig
from precompute.inputs.clip_list import with_checked_starts
from precompute.sources.listing import Samples

TABLE: list[tuple[dict[str, object], dict[int, list[int]]]] = [
    ({"pick": "head"}, {0: [0], 16: [0], 17: [0], 500: [0]}),
    ({"pick": "middle"}, {16: [0], 17: [0], 18: [0], 19: [1], 50: [16]}),
    ({"pick": "chunk"}, {0: [0], 16: [0], 17: [0], 33: [0], 34: [0, 17], 50: [0, 17], 51: [0, 17, 34]}),
    ({"pick": "slide", "stride": 8}, {16: [0], 24: [0], 25: [0, 8], 33: [0, 8, 16]}),
    ({"pick": "chunk", "frames": [9, 17]}, {8: [0], 9: [0], 16: [0], 17: [0], 33: [0], 34: [0, 17]}),
    ({"pick": "middle", "frames": [9, 17]}, {8: [0], 13: [2], 17: [0], 21: [2]}),
]
"""Fields, and the first frame of each clip by the number of frames that a video has."""


@pytest.mark.parametrize(("fields", "firsts"), TABLE, ids=lambda each: str(each) if "pick" in each else "")
def test_clips_begin_where_the_pick_says(fields, firsts):
    """A video that is too short has one clip all the same, which is rejected with its reason."""
    config = ClipConfig(**{"frames": 17, "fps": 16, **fields})
    assert {available: [*config.first_frames(available)] for available in firsts} == firsts


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"frames": [9, 9], "fps": 16}, r"clip.frames must be .* ascending order, got \[9, 9\]"),
    ({"frames": 17}, r"clip.fps is missing: 16 for Wan 2.1"),
    ({"frames": 17, "fps": float("nan")}, r"clip.fps must be above 0 .*got nan"),
    ({"frames": 17, "fps": 16, "pick": "slide"}, r"clip.stride is missing"),
    ({"frames": 17, "fps": 16, "stride": 4}, r"clip.stride has no effect without clip.pick: slide"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=str)
def test_a_section_that_cannot_be_is_refused_in_one_line(fields, message):
    with pytest.raises(ConfigError) as raised:
        ClipConfig(**fields)
    assert re.search(message, str(raised.value)), str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("start", [None, "soon", -1, 1e300])
def test_a_start_that_is_no_time_is_refused(start):
    samples = Samples([{"id": "a", "conversations": [], "extra": {"clip_start": start}}])
    with pytest.raises(SourceError, match="source.fields.extra: clip_start of a "):
        list(with_checked_starts(samples))
