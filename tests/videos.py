"""Small videos whose frames tell their numbers: `make_video` writes one, `number_of` reads a frame's number back."""

# Sizes are width, height in pixels. Axes: Y X rows and columns, 3 RGB.

import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

ENCODERS = {
    "h264": "libx264",
    "hevc": "libx265",
    "vp8": "libvpx",
    "vp9": "libvpx-vp9",
    "av1": "libsvtav1",
    "mpeg4": "mpeg4",
}
"""Encoders by the names of their codecs."""

QUICK = {
    "h264": {"preset": "veryfast", "crf": "12"},
    "hevc": {"preset": "ultrafast", "x265-params": "log-level=none:pools=none:frame-threads=1:crf=12"},
    "vp8": {"deadline": "realtime", "cpu-used": "8", "crf": "4", "b": "2M"},
    "vp9": {"deadline": "realtime", "cpu-used": "8", "crf": "10", "b": "0"},
    "av1": {"preset": "8", "crf": "5", "svtav1-params": "lp=1:hierarchical-levels=3"},
    "mpeg4": {"qscale": "2"},
}

os.environ.setdefault("SVT_LOG", "1")  # else SVT-AV1 prints its settings

BITS = 8
"""Stripes that write a frame's number, the highest bit on the left: white for 1, black for 0."""
TICKS = 90_000
"""Timestamps per second, where they are chosen."""


def scene(number: int, size: tuple[int, int]) -> np.ndarray:
    """Draw frame `number`, of up to 255, [Y, X, 3]: a moving gradient, and below it the number in stripes."""
    width, height = size
    x, y = np.arange(width), np.arange(height)[:, None]
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[..., 0] = 60 + 120 * x // width + (number * 3) % 40
    pixels[..., 1] = 60 + 120 * y // height
    pixels[..., 2] = 100 + 60 * ((x + y + number * 2) % width > width // 2)
    bits = [number >> (BITS - 1 - bit) & 1 for bit in range(BITS)]
    pixels[height // 2 :] = (np.array(bits, np.uint8)[x * BITS // width] * 255)[:, None]
    return pixels


def number_of(image: Image.Image) -> int:
    """Read the number of an upright frame, of any size but cut nowhere."""
    width, height = image.size
    grey = np.asarray(image.convert("L"))[height * 3 // 4]
    return int("".join(str(int(grey[(2 * bit + 1) * width // (2 * BITS)] > 127)) for bit in range(BITS)), 2)


def stored(pixels: np.ndarray, rotation: int, mirrored: bool) -> np.ndarray:
    """Turn an upright frame as a camera stores it whose display matrix turns it back."""
    return np.ascontiguousarray(np.rot90(pixels[:, ::-1] if mirrored else pixels, -(rotation // 90)))


def add_silence(container: Any, seconds: float) -> None:
    stream = container.add_stream("libopus" if container.format.name in ("webm", "matroska") else "aac", rate=48_000)
    for place in range(round(seconds * 48)):
        frame = av.AudioFrame.from_ndarray(np.zeros((2, 48), np.float32), "fltp", "stereo")
        frame.sample_rate, frame.pts, frame.time_base = 48_000, place * 48, Fraction(1, 48_000)
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


def add_cover(container: Any) -> Any:
    cover = container.add_stream("mjpeg", rate=1)
    cover.width, cover.height, cover.pix_fmt = 32, 32, "yuvj420p"
    cover.disposition = av.stream.Disposition.attached_pic
    return cover


def make_video(
    path: Path,
    *,
    codec: str = "h264",
    frames: int = 24,
    fps: int | Fraction = 24,
    size: tuple[int, int] = (64, 48),
    gop: int = 12,
    bframes: int = 2,
    rotation: int = 0,
    mirrored: bool = False,
    timestamps: Sequence[float] | None = None,
    audio: float = 0.0,
    cover: bool = False,
    pix_fmt: str = "yuv420p",
    aspect: Fraction | None = None,
    colour: dict[str, int] | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    draw: Callable[[int, tuple[int, int]], np.ndarray] = scene,
) -> Path:
    """Write a video into the container that the path's suffix names, and return the path.

    `size` is that of the upright frames; H.264 and HEVC need even sides. `rotation` is the degrees by which a player
    turns the stored frames counter-clockwise, before it mirrors them. `timestamps` are seconds, `audio` the seconds of
    a silent sound track, `aspect` the width over the height of a pixel. `colour` has fields of the stream, such as
    `{"colorspace": 1, "color_range": 2}`.
    """
    with av.open(str(path), "w", container_options=container_options or {}) as container:
        chosen = QUICK[codec] | {"g": str(gop)} | ({"bf": str(bframes)} if codec in ("h264", "hevc", "mpeg4") else {})
        if codec == "hevc":
            chosen["x265-params"] += f":keyint={gop}:min-keyint={gop}:bframes={bframes}"
        stream = container.add_stream(ENCODERS[codec], rate=fps, options=chosen | (options or {}))
        stream.height, stream.width = stored(draw(0, size), rotation, mirrored).shape[:2]
        stream.pix_fmt, stream.codec_context.thread_count = pix_fmt, 1
        base = Fraction(1, TICKS) if timestamps else 1 / Fraction(fps)
        stream.codec_context.time_base = stream.time_base = base
        if rotation or mirrored:
            stream.set_display_rotation(rotation, hflip=mirrored)
        if aspect:
            stream.sample_aspect_ratio = aspect
        for name, value in (colour or {}).items():
            setattr(stream.codec_context, name, value)
        picture = add_cover(container) if cover else None
        if audio:
            add_silence(container, audio)
        if picture:
            container.mux(picture.encode(av.VideoFrame(32, 32, "yuvj420p")))
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(stored(draw(number, size), rotation, mirrored), "rgb24")
            frame.pts = round(timestamps[number] * TICKS) if timestamps else number
            frame.time_base = base
            container.mux(stream.encode(to_yuv(frame, pix_fmt, colour or {})))
        container.mux(stream.encode())
    return path


def to_yuv(frame: av.VideoFrame, pix_fmt: str, colour: dict[str, int]) -> av.VideoFrame:
    """Convert by the matrix and range that the stream's tags say, by default those of BT.601."""
    matrices = {1: "ITU709", 9: "BT2020"}
    made = frame.reformat(
        format=pix_fmt,
        dst_colorspace=matrices.get(colour.get("colorspace", 0), "ITU601"),
        src_color_range=2,
        dst_color_range=colour.get("color_range", 1) or 1,
    )
    made.pts, made.time_base = frame.pts, frame.time_base
    return made
