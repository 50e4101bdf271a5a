"""Measure images or clips per second of a whole build around an encoder that only sleeps.

Pipeline and writer are a build's; the encoder takes `--encoder-ms` a batch and no core, and serves one worker at a
time. All rates are those after the start. The rivals are decoding alone in as many threads, the encoder alone, and, for
images, a torch DataLoader in the build's place: it has as many processes as there are cores, and saves one file a batch
with np.save; it checks, hashes and sums nothing.
"""

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks import sleeping
from benchmarks.build import Parts, Steps, encoder_alone, steady_rate
from benchmarks.harness import parser_with, positive_int, program, ratios, report
from benchmarks.photographs import write_images
from cache_store.program.command_line import parse_config
from cache_store.program.running import usable_cores
from precompute.config import BuildConfig
from precompute.encode.batches import InputBuffers, make_buffer

# Axes: N images of a batch, Y X pixels, 3 RGB.

PACKAGES = ("torch", "numpy", "pillow", "encode-once")
OURS, ENCODER, DECODING, PEER = "build", "encoder alone", "decoding alone", "DataLoader"
SLOWER = "the slower alone"


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    is_stubbed = options.decode == "stub"
    with (
        tempfile.TemporaryDirectory(prefix="feed-", dir=options.folder) as name,
        sleeping.standing_in(Path(name), options.encoder_ms, is_stubbed=is_stubbed),
    ):
        parts = Parts(config_of(Path(name), options))
        works: dict[str, Callable[[], float]] = {
            OURS: lambda: parts.build().steady_images_per_s,
        }
        if options.decode != "video":
            works[PEER] = partial(by_data_loader, parts.config, options)
        if options.encoder_ms:
            works[ENCODER] = partial(sleeping_alone, parts, max(1, min(60, options.samples // options.batch_size)))
        if not is_stubbed:
            works[DECODING] = partial(decoding_alone, parts)
        speeds: dict[str, list[float]] = {work: [] for work in works}
        for _ in range(options.repeats):
            for work, measure in works.items():
                speeds[work].append(measure())
    over = {f"{OURS} over {work}": ratios(speeds[OURS], each) for work, each in speeds.items() if work != OURS}
    if ENCODER in works and DECODING in works:
        slower = [min(both) for both in zip(speeds[ENCODER], speeds[DECODING], strict=True)]
        over[f"{OURS} over {SLOWER}"] = ratios(speeds[OURS], slower)
    report(options, PACKAGES, "clips_per_s" if options.decode == "video" else "images_per_s", speeds, over)
    return 0


def option_parser() -> argparse.ArgumentParser:
    parser = parser_with(__doc__, "images", "mosaic", "height", "width", "folder", count=196, batch_size=32, repeats=3)
    parser.add_argument("--samples", type=positive_int, default=5_888, help="number of rows; images are repeated")
    parser.add_argument("--encoder-ms", type=float, default=11.7, help="time for a batch; 11.7 is a compiled H100's")
    parser.add_argument("--decode", choices=("stub", "real", "video"), default="real")
    parser.add_argument("--frames", type=positive_int, default=33, help="frames of a clip, with --decode video")
    parser.add_argument("--workers", default="auto", help="run.workers of the build: a number, or auto")
    parser.add_argument("--samples-per-shard", type=positive_int, default=1_024)
    return parser


def config_of(folder: Path, options: argparse.Namespace) -> BuildConfig:
    """Write images and list, or videos, and return the config of a build of them; rows share files."""
    values = (source_of_videos if options.decode == "video" else source_of_images)(folder, options)
    values |= {
        "cache": folder / "cache",
        "image.height": options.height,
        "image.width": options.width,
        "encoder.model": sleeping.MODEL,
        "encoder.batch_size": options.batch_size,
        "encoder.device": "cpu",
        "store.samples_per_shard": options.samples_per_shard,
        "run.workers": options.workers,
    }
    return parse_config(BuildConfig, [f"--{name}={value}" for name, value in values.items()])


def source_of_images(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    write_images(folder / "images", options, options.count)
    rows = [
        {"id": f"{row}", "image": f"{row % options.count:06d}.jpg", "conversations": []}
        for row in range(options.samples)
    ]
    (folder / "chat.json").write_bytes(msgspec.json.encode(rows))
    return {"source.kind": "llava", "source.path": folder / "chat.json", "source.images": folder / "images"}


def source_of_videos(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.videos import CLIP_FPS, write_videos  # needs PyAV

    write_videos(folder / "videos", options, options.samples)
    clip = {"clip.frames": options.frames, "clip.fps": CLIP_FPS}
    return {"source.kind": "folder", "source.path": folder / "videos", **clip}


def sleeping_alone(parts: Parts, batches: int) -> float:
    return encoder_alone(sleeping.feed_of(parts.encoder()), parts.spec.array_of(0), batches)


def decoding_alone(parts: Parts) -> float:
    """Return images or clips per second read, hashed, decoded and fitted, in as many threads as there are cores."""
    buffers, steps = InputBuffers(make_buffer), [(time.monotonic(), 0)]
    for batch in parts.decoded(usable_cores(), buffers.take):
        buffers.give_back(batch.buffer)
        steps.append((time.monotonic(), steps[-1][1] + len(batch.inputs)))
    return steady_rate(steps)


class Images(Dataset[np.ndarray]):
    """A data set as users write it."""

    def __init__(self, paths: list[Path], options: argparse.Namespace) -> None:
        self._paths, self._size, self._is_stubbed = paths, (options.width, options.height), options.decode == "stub"

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, row: int) -> np.ndarray:
        data = self._paths[row].read_bytes()
        if self._is_stubbed:
            return np.array(sleeping.stub(*reversed(self._size)))
        return np.array(Image.open(io.BytesIO(data)).convert("RGB").resize(self._size, Image.Resampling.BILINEAR))


def by_data_loader(config: BuildConfig, options: argparse.Namespace) -> float:
    images = sorted(Path(str(config.source.images)).iterdir())
    paths = [images[row % len(images)] for row in range(options.samples)]
    encoder = sleeping.Sleeping(torch.device("cpu"), torch.float32)
    with tempfile.TemporaryDirectory(dir=Path(config.cache).parent) as folder:
        steps: Steps = [(time.monotonic(), 0)]
        for pixels_NYX3 in DataLoader(Images(paths, options), options.batch_size, num_workers=usable_cores()):
            samples = encoder.encode(pixels_NYX3.permute(0, 3, 1, 2).unsqueeze(2))
            np.save(f"{folder}/{len(steps):06d}.npy", samples.numpy().astype(np.float16))
            steps.append((time.monotonic(), steps[-1][1] + len(samples)))
    return steady_rate(steps)


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
