"""Hostile and damaged video files: rejected with a reason, at a bounded cost, and nothing else is opened for them."""

import io
import random
import resource
import struct
import time
from collections.abc import Callable
from contextlib import suppress

import av
import msgspec
import pytest

from cache_store.format.array import ClipRecipe, Size
from precompute.clips.video import decode_clip, probe_video
from precompute.images.config import ImageConfig
from precompute.images.rejected import Rejected
from tests.families import first_and_slow
from tests.videos import make_video

FRAMES = 24
NAMES = ("h264.mp4", "h264.mkv", "hevc.mp4", "vp8.webm", "vp9.webm", "av1.webm", "mpeg4.avi")
RECIPE = msgspec.structs.replace(ImageConfig(width=64, height=48).recipe, clip=ClipRecipe(counts=(FRAMES,), fps=24.0))
PLANNED = Size(FRAMES, 48, 64)
MAX_PIXELS = 10**8
MORE_BYTES = 200 * 2**20
"""Memory that a hostile file may take beyond an honest one."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("videos")
    made = {name: make_video(folder / name, codec=name.split(".")[0], frames=FRAMES).read_bytes() for name in NAMES}
    fragments = {"movflags": "frag_keyframe+empty_moov"}
    made["fragments"] = make_video(folder / "a.mp4", frames=FRAMES, container_options=fragments).read_bytes()
    return made


def test_a_script_opens_no_other_file(made, tmp_path):
    (tmp_path / "secret.mp4").write_bytes(made["h264.mp4"])
    path = tmp_path / "a.mp4"
    path.write_text(f"ffconcat version 1.0\nfile {tmp_path / 'secret.mp4'}\n")
    with av.open(str(path), options={"safe": "0"}) as opened:  # which FFmpeg would
        assert len(list(opened.decode(video=0))) == FRAMES
    with path.open("rb") as file, pytest.raises(Rejected, match="cannot decode: is text"):
        probe_video(file, MAX_PIXELS)


INSIDE = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"dinf", b"moof", b"traf"}
"""Boxes that hold boxes."""


def box(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", len(body) + 8, name) + body


def rebuilt(data: bytes, change: Callable[[bytes, bytes], bytes]) -> bytes:
    """Replace the content of boxes, at all levels."""
    made, place = b"", 0
    while place + 8 <= len(data):
        size, name = struct.unpack_from(">I4s", data, place)
        body = data[place + 8 : place + size]
        body = change(name, rebuilt(body, change) if name in INSIDE else body)
        made, place = made + box(name, body), place + size
    return made


CLAIMED = 80_000_000
CLAIMS = {
    "samples of one size": ("h264.mp4", {b"stsz": (0, 1, CLAIMED), b"stsc": (0, 1, 1, CLAIMED, 1)}),
    "a run in a fragment": ("fragments", {b"trun": (1, CLAIMED, 100)}),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_of_many_samples_take_little_memory(made, claim):
    name, tables = CLAIMS[claim]
    data = rebuilt(
        made[name], lambda name, body: struct.pack(f">{len(tables[name])}I", *tables[name]) if name in tables else body
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = reasons_or_frames(data)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MORE_BYTES
    assert found == "too many parts: the file's tables claim more than 2,000,000 samples"


def reasons_or_frames(data: bytes) -> str | int:
    try:
        probe_video(io.BytesIO(data), MAX_PIXELS)
        return len(list(decode_clip(io.BytesIO(data), 0.0, RECIPE, PLANNED).images))
    except Rejected as rejected:
        return rejected.reason


def test_uncompressed_sound_has_any_number_of_samples(made):
    """Cameras write it beside H.264; an hour has 172,800,000 samples."""
    times, sizes = struct.pack(">4I", 0, 1, 1, 1), struct.pack(">3I", 0, 2, CLAIMED)
    trak = box(b"trak", box(b"hdlr", bytes(8) + b"soun") + box(b"stts", times) + box(b"stsz", sizes))
    data = rebuilt(made["h264.mp4"], lambda name, body: body + trak if name == b"moov" else body)
    assert reasons_or_frames(data) == FRAMES


def test_a_large_video_is_refused_before_it_is_decoded(made):
    with pytest.raises(Rejected, match="too large: 64 x 48 pixels, more than 3,000, or than 1,000,000 a side"):
        probe_video(io.BytesIO(made["h264.mp4"]), 3_000)


@pytest.mark.parametrize(
    ("size", "found"),
    [
        ((128, 96), "size changes: from 64 x 48 to 128 x 96 pixels"),
        ((2048, 1024), "damaged video: a frame cannot be decoded"),  # by FFmpeg, which is told the most pixels
    ],
)
def test_frames_that_grow_are_refused(tmp_path, size, found):
    small = make_video(tmp_path / "small.webm", codec="vp9", frames=4)
    large = make_video(tmp_path / "large.webm", codec="vp9", frames=4, size=size)
    with av.open(str(small)) as first, av.open(str(large)) as second, av.open(str(tmp_path / "a.webm"), "w") as joined:
        stream = joined.add_stream_from_template(first.streams.video[0])
        packets = [packet for file in (first, second) for packet in file.demux(video=0) if packet.dts is not None]
        for number, packet in enumerate(packets):
            packet.pts, packet.dts, packet.stream = number * 42, number * 42, stream
            joined.mux(packet)
    data = (tmp_path / "a.webm").read_bytes()
    recipe = msgspec.structs.replace(RECIPE, max_pixels=128 * 96)
    with pytest.raises(Rejected, match=found):
        list(decode_clip(io.BytesIO(data), 0.0, recipe, PLANNED).images)


def test_another_codec_is_refused(tmp_path):
    with av.open(str(tmp_path / "a.avi"), "w") as container:
        stream = container.add_stream("mjpeg", rate=24)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuvj420p"
        container.mux(stream.encode(av.VideoFrame(32, 32, "yuvj420p")))
        container.mux(stream.encode())
    with (tmp_path / "a.avi").open("rb") as file, pytest.raises(Rejected, match="the codec is none of H.264, HEVC"):
        probe_video(file, MAX_PIXELS)


def frames_until_reject(data: bytes) -> list[bytes]:
    """Return the frames of a whole clip that were given before it was rejected, if it was."""
    frames = []
    with suppress(Rejected):
        frames.extend(image.tobytes() for image in decode_clip(io.BytesIO(data), 0.0, RECIPE, PLANNED).images)
    return frames


@pytest.mark.parametrize("name", first_and_slow([*NAMES, "fragments"]))
def test_a_truncated_file_gives_whole_frames_then_a_reject(made, name):
    data, whole = made[name], frames_until_reject(made[name])
    for place in range(len(data) // 20, len(data) - 400, len(data) // 250):
        frames = frames_until_reject(data[:place])
        assert len(frames) < FRAMES
        assert set(frames) <= set(whole)
        assert str(reasons_or_frames(data[:place])).startswith(
            ("too short: ", "damaged video: ", "cannot decode: ", "no video stream: ")
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "fragments"])
def test_random_damage_never_gets_past_a_reject(made, name, capfd):
    dice, before = random.Random(name), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(30):
        data = bytearray(made[name])
        for _ in range(dice.randrange(1, 6)):
            data[dice.randrange(len(data) if dice.random() < 0.5 else 700)] = dice.choice(
                (0, 127, 255, dice.randrange(256))
            )
        begin = time.monotonic()
        found = reasons_or_frames(bytes(data))
        assert found == FRAMES or isinstance(found, str)
        assert time.monotonic() - begin < 5
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MORE_BYTES
    assert capfd.readouterr() == ("", "")
