"""Measure images per second of a whole `precompute build` against its parts alone: decoding and encoding.

On a GPU a build should reach the slower of decoding and encoding; on a CPU the two share the cores, so the build is
compared with doing both in turn. A build's rate is measured from the moment its encoder is loaded. Memory is the peak
of a separate process, for `--count` images and for ten times as many.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from benchmarks.harness import parser_with, program, rates, ratios, report, take_turns
from benchmarks.photographs import write_images
from cache_store.cache.metadata import read_spec
from cache_store.format.array import ArraySpec
from cache_store.format.schema import Spec
from cache_store.program.command_line import parse_config
from cache_store.program.running import usable_cores
from cache_store.storage.store import open_store
from demo.vae import random_vae
from precompute.build.request import BuildRequest
from precompute.build.steps import plan_for_ranks
from precompute.config import BuildConfig
from precompute.encode.batches import Batch, Decoders, decoded_batches, make_buffer, planned_batches
from precompute.encode.device_feed import SLOTS, DeviceFeed, Encoding
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.launchers import run_workers
from precompute.encode.progress import BuildProgress
from precompute.encode.worker import ENCODER_THREADS
from precompute.encoders.encoder import Encoder
from precompute.encoders.registry import load_encoder
from precompute.inputs import make_reader
from precompute.inputs.reader import Inputs
from precompute.sources.opening import open_source

# Axes: N images of a batch, Y X pixels, 3 RGB.

PACKAGES = ("pillow", "torch", "diffusers", "numpy", "encode-once")
MORE = 10
"""Factor of images that shows whether memory grows with them."""

STEADY = 0.3
"""Share of a build's images done before its steady rate is measured: all workers have then started."""

PEAK = """
import sys
from precompute.cli import main
code = main(sys.argv[1:])
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
sys.exit(code)
"""
"""Program that prints its peak memory in KiB; a child's `ru_maxrss` would start with its parent's."""

Steps = list[tuple[float, int]]
"""Times, and how many images were done by then."""


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="build-", dir=options.folder) as name:
        folder = Path(name)
        save_vae(folder / "model", options.vae)
        write_images(folder / "images", options, options.count)
        parts = Parts(config_in(folder, "images", options))
        parts.build()
        pixels_NYX3, encoder = parts.decode(1), parts.encoder()

        def encode() -> None:
            torch.set_num_threads(ENCODER_THREADS)
            for batch_NYX3 in pixels_NYX3:
                encoder.encode(torch.from_numpy(batch_NYX3)).cpu()

        builds = list[Built]()
        works: dict[str, Callable[[], object]] = {
            "build": lambda: builds.append(parts.build()),
            "decode only": partial(parts.decode, usable_cores()),
            "encode only": encode,
        }
        seconds = take_turns(works, options.repeats)
        write_images(folder / "more", options, options.count * MORE)
        counts = {"images": options.count, "more": options.count * MORE}
        peak_mib = {str(count): peak_mib_of(folder, each, options) for each, count in counts.items()}
    measured = [*zip(builds[-options.repeats :], seconds["decode only"], seconds["encode only"], strict=True)]
    speeds = {name: rates(options.count, each) for name, each in seconds.items()}
    speeds["build"] = [each.images_per_s for each, *_ in measured]
    over = {
        "build over the slower": ratios(speeds["build"], [options.count / max(both) for _, *both in measured]),
        "build over both in turn": ratios(speeds["build"], [options.count / sum(both) for _, *both in measured]),
    }
    report(options, PACKAGES, "images_per_s", speeds, over, decode_threads=usable_cores(), peak_mib=peak_mib)
    return 0


def option_parser() -> argparse.ArgumentParser:
    names = ("vae", "images", "mosaic", "height", "width", "repeats", "folder")
    return parser_with(__doc__, *names, count=196, batch_size=8, compute_dtype="bfloat16")


def save_vae(folder: Path, size: str) -> None:
    torch.manual_seed(0)
    vae = random_vae(0) if size == "demo" else AutoencoderKLWan(decoder_base_dim=8)
    vae.save_pretrained(folder / "vae")


def arguments(folder: Path, images: str, options: argparse.Namespace) -> list[str]:
    """Return the options with which `precompute build` builds the cache `{images}.cache` of the folder `{images}`."""
    values = {
        "cache": folder / f"{images}.cache",
        "source.kind": "folder",
        "source.path": folder / images,
        "image.height": options.height,
        "image.width": options.width,
        "encoder.model": folder / "model",
        "encoder.compute_dtype": options.compute_dtype,
        "encoder.batch_size": options.batch_size,
        "store.samples_per_shard": options.batch_size * max(1, options.count // options.batch_size // 3),
    }
    return [f"--{name}={value}" for name, value in values.items()]


def config_in(folder: Path, images: str, options: argparse.Namespace, *more: str) -> BuildConfig:
    return parse_config(BuildConfig, [*arguments(folder, images, options), *more])


@dataclass(frozen=True)
class Built:
    """The speed of one build."""

    images_per_s: float
    """From the moment that its encoder was loaded."""
    steady_images_per_s: float
    encoder_works: float
    slowest: str | None
    busy_s: dict[str, float]


class Parts:
    """A whole build, and its decoding alone."""

    def __init__(self, config: BuildConfig) -> None:
        self.config = config

    @property
    def spec(self) -> Spec:
        """The spec of the cache that was built last."""
        return read_spec(open_store(self.config.cache))

    def encoder(self) -> Encoder:
        return load_encoder(self.config.encoder, self.config.image_recipe)

    def build(self) -> Built:
        """Plan, load the encoder, and build every shard, on this machine."""
        config = self.config
        shutil.rmtree(config.cache, ignore_errors=True)
        plan_for_ranks(config, BuildRequest())
        store, encoder = open_store(config.cache), self.encoder()
        spec = read_spec(store)
        job = EncodeJob(config=config, store=store, spec=spec, shards=range(spec.num_shards))
        with closing(BuildProgress(spec.rows, [], 1.0)) as progress:
            steps: Steps = [(time.monotonic(), 0)]

            def on_progress(one: Progress) -> None:
                progress(one)
                steps.append((time.monotonic(), progress.images))

            run_workers(job, open_source(config.source, config.media), encoder, on_progress)
        return Built(
            images_per_s=round(steady_rate(steps, 0), 1),
            steady_images_per_s=round(steady_rate(steps), 1),
            encoder_works=round(progress.working_share, 3),
            slowest=progress.encoded.slowest,
            busy_s={part: round(seconds, 1) for part, seconds in progress.busy_s.items()},
        )

    def decode(self, threads: int) -> list[np.ndarray]:
        """Read, hash, decode and fit all images of the cache that was built last; return the batches."""
        return [batch.inputs for batch in self.decoded(threads)]

    def decoded(self, threads: int, buffers: Callable[[ArraySpec], Inputs] = make_buffer) -> Iterator[Batch]:
        """Yield the same batches one by one, decoded a few ahead in these buffers."""
        config, spec = self.config, self.spec
        store, reader = open_store(config.cache), make_reader(open_source(config.source, config.media), spec.array)
        with Decoders(threads) as pool:
            planned = planned_batches(reader, store, spec, range(spec.num_shards), buffers)
            for batch in decoded_batches(planned, pool):
                batch.wait()
                yield batch


def steady_rate(steps: Steps, steady: float = STEADY) -> float:
    """Return images per second from the first step that has this share of the images to the first that has all.

    A share of 0 gives the rate of the whole, to the last step.
    """
    last_s, images = steps[-1]
    if steady:
        last_s = next(at_s for at_s, done in steps if done == images)
    first_s, done = next(step for step in steps if step[1] >= steady * images)
    return (images - done) / max(last_s - first_s, 1e-9)


def encoder_alone(feed: DeviceFeed, array: ArraySpec, batches: int = 60) -> float:
    """Return images per second through a build's feed to the device, with nothing else running."""
    buffer, ahead, batch_size = feed.buffers.take(array), deque[Encoding](), array.encoder.batch_size
    buffer[:] = np.random.default_rng(0).integers(0, 256, buffer.shape, np.uint8)
    feed.encode(array, buffer, batch_size)()
    started = time.monotonic()
    for _ in range(batches):
        ahead.append(feed.encode(array, buffer, batch_size))
        if len(ahead) == SLOTS:
            ahead.popleft()()
    for each in ahead:
        each()
    return batches * batch_size / (time.monotonic() - started)


def peak_mib_of(folder: Path, images: str, options: argparse.Namespace) -> float:
    shutil.rmtree(folder / f"{images}.cache", ignore_errors=True)
    command = [sys.executable, "-c", PEAK, "build", *arguments(folder, images, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return round(int(done.stdout.splitlines()[-1]) / 2**10, 1)


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
