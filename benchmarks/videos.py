"""H.264 videos for benchmarks: a camera moves over photographs, or over smooth noise."""

import argparse
import io
import os
from pathlib import Path

import av
import numpy as np
from PIL import Image

from benchmarks.photographs import jpegs_of

SOURCE_FPS, CLIP_FPS = 24, 16
"""Frames per second of a video, and of a clip of it."""
MARGIN = 1.25
"""Sides of what the camera moves over, per side of a frame."""


def write_videos(folder: Path, options: argparse.Namespace, count: int) -> None:
    """Write `count` files, each just long enough for a clip of `options.frames`; they repeat if there are fewer images.

    Repeated ones are links.
    """
    folder.mkdir()
    images = jpegs_of(options)[:count]
    paths = [folder / f"{number:06d}.mp4" for number in range(count)]
    for path, image in zip(paths, images, strict=False):
        write_video(path, image, (options.width, options.height), frames_for(options.frames))
    for number in range(len(images), count):
        os.link(paths[number % len(images)], paths[number])


def frames_for(clip_frames: int) -> int:
    """Return how many frames a video needs, to show the last frame of a clip."""
    return (clip_frames - 1) * SOURCE_FPS // CLIP_FPS + 1


def write_video(path: Path, image: bytes, size: tuple[int, int], frames: int) -> None:
    """Write frames of this width and height that move over the image, from its left upper to its right lower corner."""
    width, height = size
    right, lower = round(width * (MARGIN - 1)), round(height * (MARGIN - 1))
    scene = Image.open(io.BytesIO(image)).convert("RGB").resize((width + right, height + lower))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=SOURCE_FPS, options={"preset": "fast"})
        stream.width, stream.height, stream.pix_fmt, stream.codec_context.thread_count = width, height, "yuv420p", 1
        for number in range(frames):
            left, top = (room * number // frames for room in (right, lower))
            shown = scene.crop((left, top, left + width, top + height))
            frame = av.VideoFrame.from_ndarray(np.asarray(shown), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
