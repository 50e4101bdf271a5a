"""Clips of video files: the frames that a clip shows, the same bits however they are reached, upright and in colour."""

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path

import av
import msgspec
import numpy as np
import pytest

from cache_store.errors import ConfigError, SourceError
from cache_store.format.array import ClipRecipe, ImageRecipe, Size
from precompute.clips import video_file
from precompute.clips.config import ClipConfig
from precompute.clips.opened import load_av
from precompute.clips.video import MAX_SECONDS, Clip, Video, decode_clip, probe_video
from precompute.images.config import ImageConfig
from precompute.images.fit import unreduced
from precompute.images.rejected import Rejected
from precompute.inputs.clip_list import with_checked_starts
from precompute.sources.listing import Samples
from tests.families import first_and_slow
from tests.precompute.images.fitting import fitted, size_of
from tests.videos import make_video, number_of, scene

FRAMES, RATE = 50, 24
SIZE = (64, 48)
NO_SCENECUT = "keyint=12:min-keyint=12:scenecut=0"
X265 = f"log-level=none:pools=none:frame-threads=1:crf=12:bframes=4:{NO_SCENECUT}"
MADE: dict[str, dict[str, object]] = {
    "h264.mp4": {},
    "h264.avi": {},
    "hevc.mp4": {},
    "vp8.webm": {},
    "vp9.webm": {},
    "av1.mp4": {},
    "mpeg4.avi": {},
    "h264 fragments.mp4": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "h264 sound.mov": {"audio": 4.0, "container_options": {"movflags": "faststart"}},
    "h264 one gop.mp4": {"gop": 1000},
    "h264 open gop.mp4": {"options": {"bf": "3", "x264-params": f"open-gop=1:{NO_SCENECUT}"}},
    "h264 refresh.mkv": {"options": {"bf": "3", "x264-params": "intra-refresh=1:keyint=12"}},
    "hevc open gop.mkv": {"options": {"preset": "medium", "x265-params": f"{X265}:open-gop=1"}},
    "vp9 hidden frames.webm": {"options": {"deadline": "good", "cpu-used": "5", "lag-in-frames": "16"}},
    "av1 open gop.webm": {"options": {"svtav1-params": "lp=1:irefresh-type=1:hierarchical-levels=3"}},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of FRAMES frames at RATE frames per second."""
    folder = tmp_path_factory.mktemp("videos")
    return {
        name: make_video(
            folder / name, codec=name.split(".")[0].split()[0], frames=FRAMES, fps=RATE, **options
        ).read_bytes()
        for name, options in MADE.items()
    }


def recipe_of(frames: int, fps: float | None = RATE, size: tuple[int, int] = SIZE, **fields: object) -> ImageRecipe:
    image = ImageConfig(width=size[0], height=size[1], **fields).recipe
    return msgspec.structs.replace(image, clip=ClipRecipe(counts=(frames,), fps=fps))


def clip_of(data: bytes, start: float, frames: int, fps: float | None = RATE, **fields: object) -> Clip:
    recipe = recipe_of(frames, fps, **fields)
    return decode_clip(io.BytesIO(data), start, recipe, size_of(recipe)._replace(frames=frames))


def numbers(data: bytes, start: float, frames: int, fps: float | None = RATE, **fields: object) -> list[int]:
    return [number_of(image) for image in clip_of(data, start, frames, fps, **fields).images]


def probe(data: bytes, max_pixels: int = 10**8) -> Video:
    return probe_video(io.BytesIO(data), max_pixels)


def reason(data: bytes, start: float = 0.0, frames: int = 2, **fields: object) -> str:
    """Return why a clip is rejected."""
    with pytest.raises(Rejected) as caught:
        list(clip_of(data, start, frames, **fields).images)
    return caught.value.reason


@pytest.mark.parametrize("name", first_and_slow(MADE, quick=2))
def test_a_clip_shows_the_frame_of_each_of_its_times(made, name):
    assert numbers(made[name], 0.25, 8, 16) == [6, 7, 9, 10, 12, 13, 15, 16]
    assert numbers(made[name], 1.0, 6, 48) == [24, 24, 25, 25, 26, 26]
    assert numbers(made[name], 0.51, 3, None) == [13, 14, 15]


@pytest.mark.parametrize("name", first_and_slow(MADE, quick=2))
def test_a_clip_has_the_same_bits_wherever_decoding_begins(made, name):
    whole = [image.tobytes() for image in clip_of(made[name], 0.0, FRAMES).images]
    for number in range(1, FRAMES - 2):
        clip = [image.tobytes() for image in clip_of(made[name], number / RATE, 2).images]
        assert clip == whole[number : number + 2], number


@pytest.mark.parametrize("name", first_and_slow(MADE, quick=2))
def test_a_video_is_as_long_as_its_frames_are_shown(made, name):
    video = probe(made[name])
    assert (video.width, video.height, video.frames) == (*SIZE, FRAMES)
    assert video.seconds == pytest.approx(FRAMES / RATE, abs=0.0015)
    assert video.rate == pytest.approx(RATE, rel=0.001)
    assert [video.num_frames(fps) for fps in (RATE, 16, 48, None)] == [FRAMES, 34, 2 * FRAMES, FRAMES]
    assert numbers(made[name], 0.0, 34, 16)[-1] == 49
    assert reason(made[name], frames=35, fps=16) == "too short: has 34 of 35 frames at 16 fps from 0 s"


def test_frames_of_a_variable_rate_are_shown_by_their_timestamps(tmp_path):
    times = [0, 0.1, 0.15, 0.5, 0.9, 1.0]
    data = make_video(tmp_path / "a.mp4", frames=6, timestamps=times).read_bytes()
    assert numbers(data, 0.0, 10, 10) == [0, 1, 2, 2, 2, 3, 3, 3, 3, 4]
    assert numbers(data, 0.2, 3, None) == [3, 4, 5]
    assert (probe(data).frames, probe(data).seconds) == (6, pytest.approx(1.25))  # the muxer's idea of the last one


Packets = list[av.Packet]


def remuxed(data: bytes, path: Path, change: Callable[[Packets], Iterable[av.Packet]], **options: str) -> bytes:
    """Copy a video's packets, changed together."""
    with av.open(io.BytesIO(data)) as old, av.open(str(path), "w", container_options=options) as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for packet in change([packet for packet in old.demux(video=0) if packet.dts is not None]):
            packet.stream = stream
            new.mux(packet)
    return path.read_bytes()


def shifted(packets: Packets, first: int, since: int = 0) -> Iterator[av.Packet]:
    """Yield packets, from the one shown as frame `since` on, so that frame 0 has the number `first`."""
    ticks = round(1 / packets[0].time_base / RATE)
    begin = next(place for place, each in enumerate(packets) if each.is_keyframe and each.pts >= since * ticks)
    for packet in packets[begin:]:
        packet.pts, packet.dts = packet.pts + first * ticks, packet.dts + first * ticks
        yield packet


def test_times_are_counted_from_the_first_frame_that_is_shown(made, tmp_path):
    late = remuxed(made["h264.mp4"], tmp_path / "late.mkv", partial(shifted, first=30))
    cut = remuxed(made["h264.mp4"], tmp_path / "cut.mp4", partial(shifted, first=-5), avoid_negative_ts="disabled")
    assert (numbers(late, 1.0, 2), numbers(cut, 1.0, 2)) == ([24, 25], [29, 30])  # an edit list hides five frames
    assert probe(late).seconds == pytest.approx(FRAMES / RATE, abs=0.0015)
    assert probe(cut)[2:] == ((FRAMES - 5) / RATE, FRAMES - 5, RATE)


def test_a_file_that_was_cut_without_encoding_begins_at_its_first_whole_frame(made, tmp_path):
    data = remuxed(made["h264 open gop.mp4"], tmp_path / "cut.mkv", partial(shifted, first=0, since=24))
    assert numbers(data, 0.0, 3) == [24, 25, 26]


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_frames_are_upright(tmp_path, rotation, mirrored):
    size = (64, 96)
    data = make_video(tmp_path / "a.mp4", frames=3, size=size, rotation=rotation, mirrored=mirrored).read_bytes()
    clip = clip_of(data, 0.0, 3, size=size)
    images = list(clip.images)
    assert (clip.size, probe(data)[:2], [*map(number_of, images)]) == (size, size, [0, 1, 2])
    assert np.abs(np.asarray(images[2], int) - scene(2, size))[:40].mean() < 12


def test_pixels_become_square(tmp_path):
    """The aspect is that of stored pixels, before they are turned."""
    path, square = make_video(tmp_path / "a.mp4", frames=2, rotation=90, aspect=Fraction(3, 2)), (64, 72)
    clip = clip_of(path.read_bytes(), 0.0, 2, size=square)
    assert (clip.size, probe(path.read_bytes())[:2], [*map(number_of, clip.images)]) == (square, square, [0, 1])


BARS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255,) * 3, (0,) * 3, (128,) * 3, (200, 60, 30), (30, 90, 200)]


def bars(_: int, size: tuple[int, int]) -> np.ndarray:
    return np.repeat(np.array([BARS], np.uint8), size[0] // len(BARS), axis=1).repeat(size[1], axis=0)


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv420p10le"])
@pytest.mark.parametrize(
    "colour",
    [{}, *({"colorspace": matrix, "color_range": range_} for matrix, range_ in ((1, 1), (6, 2), (9, 1)))],
    ids=["untagged", "709", "601 full", "2020"],
)
def test_colours_are_those_that_the_tags_say(tmp_path, colour, pix_fmt):
    path = make_video(
        tmp_path / "a.mkv", frames=1, size=(128, 48), draw=bars, colour=colour, pix_fmt=pix_fmt, options={"crf": "2"}
    )
    (image,) = clip_of(path.read_bytes(), 0.0, 1, size=(128, 48)).images
    assert np.abs(np.asarray(image, int)[24, 8::16] - BARS).max() <= 3


def test_colours_that_would_come_out_wrong_are_rejected(tmp_path):
    hdr = make_video(tmp_path / "hdr.mkv", codec="hevc", frames=2, pix_fmt="yuv420p10le", colour={"color_trc": 16})
    assert reason(hdr.read_bytes()) == "hdr: the transfer function is PQ; convert it to SDR first"
    other = make_video(tmp_path / "other.mkv", frames=2, colour={"colorspace": 8})
    assert reason(other.read_bytes()) == "cannot decode: the colour matrix is number 8 of H.273, which is not read"


def test_a_frame_is_fitted_as_an_image_is(made):
    how = {"size": (32, 40), "fit": "crop", "resample": "lanczos"}
    (stored,), (frame,) = (clip_of(made["h264.mp4"], 0.5, 1, **each).images for each in ({}, how))
    assert frame.tobytes() == fitted(unreduced(stored), recipe_of(1, **how)).tobytes()


def test_a_cover_picture_is_no_video(tmp_path):
    data = make_video(tmp_path / "a.mp4", frames=3, cover=True).read_bytes()
    assert numbers(data, 0.0, 3) == [0, 1, 2]


def test_a_clip_reads_little_of_a_long_file(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (60, 320, 480, 3), np.uint8)
    data = make_video(
        tmp_path / "a.mp4",
        frames=60,
        gop=6,
        bframes=0,
        size=(480, 320),
        draw=lambda number, _: noise[number],
        container_options={"movflags": "faststart"},
        options={"crf": "1"},
        audio=3.0,
    ).read_bytes()
    decode = partial(decode_clip, start=1.5, recipe=recipe_of(2), planned=Size(2, *SIZE[::-1]))
    for use in (lambda file: probe_video(file, 10**8), lambda file: list(decode(file).images)):
        file = CountedFile(data)
        use(file)
        assert file.num_bytes < 4 * 2**20 < len(data) / 1.5
        assert file.num_reads <= 10


class CountedFile(io.BytesIO):
    """A file that counts what is read of it, and may fail after some reads."""

    num_bytes = num_reads = 0
    most_reads = 1_000

    def read(self, size: int | None = -1, /) -> bytes:
        if self.num_reads == self.most_reads:
            raise ConnectionError("the store is away")
        data = super().read(size)
        self.num_bytes, self.num_reads = self.num_bytes + len(data), self.num_reads + 1
        return data


@pytest.mark.parametrize("name", ["h264.mp4", "vp9.webm", "mpeg4.avi"])
def test_the_error_of_a_store_is_no_reject(made, name):
    counted = CountedFile(made[name])
    probe_video(counted, 10**8)
    for reads in range(counted.num_reads - 1):  # a failure to read beyond the end is an end all the same
        file = CountedFile(made[name])
        file.most_reads = reads
        with pytest.raises(ConnectionError, match="the store is away"):
            probe_video(file, 10**8)


def test_without_pyav_the_extra_is_named(monkeypatch):
    load_av.cache_clear()
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"'encode-once\[video\]'"):
        probe(b"")


def test_timestamps_far_apart_are_no_long_video(tmp_path):
    data = make_video(tmp_path / "a.mkv", frames=2, timestamps=[0, MAX_SECONDS + 10]).read_bytes()
    with pytest.raises(Rejected, match="too long: more than 360,000 s by its timestamps"):
        probe(data)


def test_pixels_decoded_for_one_clip_are_limited(made, monkeypatch):
    monkeypatch.setattr(video_file, "MAX_DECODED", 20 * video_file.LEAST_PIXELS)
    assert numbers(made["h264.mp4"], 1.0, 2) == [24, 25]
    assert reason(made["h264 one gop.mp4"], 1.0).startswith("too costly: more than 327,680 pixels")


# Where the clips of a video begin.

PICKS: list[tuple[dict[str, object], dict[int, list[int]]]] = [
    ({"pick": "head"}, {0: [0], 16: [0], 17: [0], 500: [0]}),
    ({"pick": "middle"}, {16: [0], 17: [0], 18: [0], 19: [1], 50: [16]}),
    ({"pick": "chunk"}, {0: [0], 16: [0], 17: [0], 33: [0], 34: [0, 17], 50: [0, 17], 51: [0, 17, 34]}),
    ({"pick": "slide", "stride": 8}, {16: [0], 24: [0], 25: [0, 8], 33: [0, 8, 16]}),
    ({"pick": "chunk", "frames": [9, 17]}, {8: [0], 9: [0], 16: [0], 17: [0], 33: [0], 34: [0, 17]}),
    ({"pick": "middle", "frames": [9, 17]}, {8: [0], 13: [2], 17: [0], 21: [2]}),
]
"""Fields, and the first frame of each clip by the number of frames that a video has."""


@pytest.mark.parametrize(("fields", "firsts"), PICKS, ids=lambda each: str(each) if "pick" in each else "")
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
    with pytest.raises(ConfigError, match=message):
        ClipConfig(**fields)


@pytest.mark.parametrize("start", [None, "soon", -1, 1e300])
def test_a_start_that_is_no_time_is_refused(start):
    samples = Samples([{"id": "a", "conversations": [], "extra": {"clip_start": start}}])
    with pytest.raises(SourceError, match="source.fields.extra: clip_start of a "):
        list(with_checked_starts(samples))
