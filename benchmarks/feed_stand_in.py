"""Stand-ins of `benchmarks.feed` for an encoder and a decoder, used by the build's workers and by its peers.

The encoder's device takes a fixed time per batch and no core. It works on one batch at a time, from any process. As on
a GPU, work is started at once and waited for later, so a build uses the streams and slots of a GPU. A stubbed decoder
returns one prepared image. Processes report by files in a folder when they have loaded and when they begin.
"""

# Axes: N images of a batch, Y X pixels, 3 RGB.

import fcntl
import json
import mmap
import multiprocessing
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import precompute.encode.batches as batches
import precompute.encode.pipeline as pipeline
from cache_store.format.array import ArraySpec, EncoderIdentity, SampleLayout
from precompute.encode.device_feed import StreamedFeed
from precompute.encode.job import EncodeJob
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Family, PixelRange
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.registry import ENTRIES, Entry
from precompute.images.fit import unreduced

CLASS_NAME = "SleepingEncoder"
FACTOR, CHANNELS = 8, 16
"""Spatial factor and channels of the latents, as of the Wan 2.1 VAE."""
POLL_S = 0.005
FREE_AT = struct.Struct("d")


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """Settings that each process reads from the folder given as the encoder's model."""

    folder: str
    encoder_ms: float
    height: int
    width: int
    is_stubbed: bool
    """Whether decoding is stubbed."""
    workers: int = 1
    """Processes that wait for each other before they begin."""

    def save(self) -> None:
        Path(self.folder).mkdir(exist_ok=True)
        values = {"_class_name": CLASS_NAME, **self.__dict__}
        Path(self.folder, "config.json").write_text(json.dumps(values))

    def stamp(self, event: str) -> None:
        """Write the time of the first such event in this process; all processes of a machine share one clock."""
        path = Path(self.folder, f"{event}-{os.getpid()}")
        if not path.exists():
            path.write_text(repr(time.monotonic()))

    def stamps(self, event: str) -> list[float]:
        return [float(text) for path in Path(self.folder).glob(f"{event}-*") if (text := path.read_text())]

    @property
    def began(self) -> float:
        """Time when images were first read and all encoders were loaded."""
        return max(min(self.stamps("read")), *self.stamps("loaded"))

    def forget(self) -> None:
        for event in ("loaded", "read"):
            for path in Path(self.folder).glob(f"{event}-*"):
                path.unlink()

    @cached_property
    def image(self) -> Image.Image:
        """The fitted image that a stubbed decoder returns."""
        noise = np.random.default_rng(0).integers(0, 256, (self.height, self.width, 3), np.uint8)
        return Image.fromarray(noise)

    @cached_property
    def pixels(self) -> np.ndarray:
        return np.array(self.image)


def stand_in_of(folder: str | Path) -> StandIn:
    values = json.loads(Path(folder, "config.json").read_text())
    values.pop("_class_name")
    return StandIn(**values)


class Device:
    """A device that all processes share by a file that holds the time when it is free."""

    def __init__(self, stand_in: StandIn) -> None:
        self._seconds = stand_in.encoder_ms / 1e3
        self._file = os.open(Path(stand_in.folder, "device"), os.O_RDWR | os.O_CREAT)
        os.truncate(self._file, FREE_AT.size)
        self._free_at = mmap.mmap(self._file, FREE_AT.size)

    def run(self, ready_at: float) -> float:
        """Queue a batch that is ready at a time; return the time when it is encoded."""
        if not self._seconds:
            return ready_at
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            done_at: float = max(ready_at, time.monotonic(), *FREE_AT.unpack(self._free_at)) + self._seconds
            self._free_at[:] = FREE_AT.pack(done_at)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return done_at


def sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


class Stream:
    """Work that is done in order; `done_at` is the time when the last is done."""

    def __init__(self) -> None:
        self.done_at = 0.0

    def wait_event(self, event: "Event") -> None:
        self.done_at = max(self.done_at, event.at)


class Event:
    def __init__(self, runtime: "SleepingRuntime") -> None:
        self._runtime, self.at = runtime, 0.0

    def record(self) -> None:
        self.at = max(self._runtime.current.done_at, time.monotonic())

    def synchronize(self) -> None:
        sleep_until(self.at)

    def elapsed_time(self, later: "Event") -> float:
        return (later.at - self.at) * 1e3


class SleepingRuntime:
    """A `Runtime` with the stand-in's device, which encodes while the process does other work."""

    def __init__(self, device: Device, samples: Tensor) -> None:
        self._device, self._samples, self.current = device, samples, Stream()
        self.stream, self.event = Stream, lambda: Event(self)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def on_device(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate samples here; pixels need no memory, since nothing reads them."""
        return torch.empty(shape, dtype=dtype, device="meta" if dtype == torch.uint8 else "cpu")

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield

    def capture(self, work: Callable[[], Tensor], stream: Stream) -> tuple[Callable[[], object], Tensor]:
        def replay() -> None:
            stream.done_at = self._device.run(stream.done_at)

        return replay, self._samples


class SleepingEncoder:
    """Encodes on the stand-in's device; its samples are noise."""

    def __init__(self, stand_in: StandIn, config: EncoderConfig) -> None:
        self._stand_in, self.device, self._device = stand_in, torch.device("cpu"), Device(stand_in)
        shape = (config.batch_size, *self.layout(stand_in.height, stand_in.width).shape)
        self._samples = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.identity = EncoderIdentity(
            class_name=CLASS_NAME,
            weights_sha256="0" * 64,
            path="native",
            compiled=False,
            posterior="mean",
            compute_dtype=config.compute_dtype,
            batch_size=config.batch_size,
            latents_mean=(0.0,) * CHANNELS,
            latents_std=(1.0,) * CHANNELS,
        )

    def layout(self, height: int, width: int) -> SampleLayout:
        shape = (CHANNELS, height // FACTOR, width // FACTOR)
        axes = ("channel", "latent_y", "latent_x")
        return SampleLayout(axes=axes, shape=shape, feature_axis="channel", has_preview=True)

    def encode(self, image_NYX3: Tensor) -> Tensor:
        """Encode and wait for the samples, as a plain loop does."""
        sleep_until(self._device.run(0.0))
        return self._samples[: len(image_NYX3)]

    def feed(self, array: ArraySpec) -> StreamedFeed:
        return StreamedFeed(self, array, SleepingRuntime(self._device, self._samples))


def load(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> SleepingEncoder:
    stand_in = stand_in_of(files.model)
    loaded = SleepingEncoder(stand_in, config)
    stand_in.stamp("loaded")
    if multiprocessing.parent_process() is not None:  # a worker, which begins with all others
        while len(stand_in.stamps("loaded")) < stand_in.workers:
            time.sleep(POLL_S)
    replace_decoder(stand_in)
    return loaded


class OwnEntry(Entry):
    """A registry entry whose family is defined here."""

    family = Family(load=load, refuse_size=lambda config, height, width: None)


ENTRIES[CLASS_NAME] = OwnEntry("", "", (CLASS_NAME,))


@dataclass(frozen=True, kw_only=True)
class FeedJob(EncodeJob):
    """A job that imports this module in the processes that it is sent to."""


OWN = {"decode_image": batches.__dict__["decode_image"], "fit_image": batches.__dict__["fit_image"]}
OWN_DECODE, OWN_FEED = batches.Batch.decode, vars(pipeline)["feed_of"]


@cache
def replace_decoder(stand_in: StandIn) -> None:
    """Record in this process when images are first read, and decode none if the decoder is stubbed."""

    def decode(batch: Any, *arguments: Any) -> Any:
        stand_in.stamp("read")
        return OWN_DECODE(batch, *arguments)

    restore_decoder()
    batches.Batch.decode = decode  # type: ignore[method-assign, assignment]
    vars(pipeline)["feed_of"] = SleepingEncoder.feed
    if stand_in.is_stubbed:
        vars(batches).update(
            decode_image=lambda data, recipe: unreduced(stand_in.image), fit_image=lambda decoded, recipe: decoded.rgb
        )


def restore_decoder() -> None:
    batches.Batch.decode = OWN_DECODE  # type: ignore[method-assign]
    vars(batches).update(OWN)
    vars(pipeline)["feed_of"] = OWN_FEED
