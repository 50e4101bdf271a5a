"""The stand-in of `benchmarks.feed`: an own encoder whose device takes a fixed time for a batch, and no core.

`encoder.model: benchmarks.sleeping:Sleeping` imports this module in every worker. All processes share one device, which
works on one batch at a time. As on a GPU, work is started at once and waited for later, so a build uses the streams and
slots of a GPU. A stubbed decoder returns one prepared image. It encodes clips too.
"""

import fcntl
import mmap
import multiprocessing
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cache_store.format.array import ArraySpec, Size
from precompute.encode import pipeline
from precompute.encode.device_feed import CudaRuntime, StreamedFeed
from precompute.encoders import own
from precompute.encoders.encoder import Encoder
from precompute.images.fit import unreduced
from precompute.inputs import frames

# Axes: N images or clips of a batch, T frames, Y X pixels, 3 RGB.

MODEL = "benchmarks.sleeping:Sleeping"
FACTOR, FRAMES_FACTOR, CHANNELS = 8, 4, 16
"""Factors of space and time, and channels of the latents, as of the Wan 2.1 VAE."""
DEVICE, ENCODER_MS, STUBBED = "SLEEPING_DEVICE", "SLEEPING_ENCODER_MS", "SLEEPING_IS_STUBBED"
"""Environment variables, by which every process learns of the stand-in."""
FREE_AT = struct.Struct("d")


@contextmanager
def standing_in(folder: Path, encoder_ms: float, *, is_stubbed: bool) -> Iterator[None]:
    """Use the stand-in in this process and those that it starts."""
    os.environ |= {DEVICE: str(folder / "device"), ENCODER_MS: str(encoder_ms), STUBBED: "1" if is_stubbed else ""}
    places = {frames: ("decode_image", "fit_image"), pipeline: ("feed_of",), own: ("OwnFamilyEncoder",)}
    before = {module: {name: vars(module)[name] for name in names} for module, names in places.items()}
    install()
    try:
        yield
    finally:
        for module, values in before.items():
            vars(module).update(values)
        for name in (DEVICE, ENCODER_MS, STUBBED):
            del os.environ[name]


def install() -> None:
    vars(pipeline)["feed_of"] = feed_of
    vars(own)["OwnFamilyEncoder"] = SleepingEncoder
    if os.environ[STUBBED]:
        vars(frames).update(
            decode_image=lambda data, recipe, size: unreduced(stub(size.height, size.width)),
            fit_image=lambda decoded, recipe, placement: decoded.rgb,
        )


class SleepingFeed(StreamedFeed):
    """A feed to the device that sleeps, whose samples are noise."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder, runtime := SleepingRuntime())
        self._sleeping = runtime

    def _prepare(self, array: ArraySpec) -> None:
        self._sleeping.samples = noise(array.encoder.batch_size, *array.shape)
        super()._prepare(array)
        self._graph = self._capture()  # of clips too, which a GPU would not capture


def feed_of(encoder: Encoder) -> StreamedFeed:
    return SleepingFeed(encoder)


def noise(count: int, *shape: int) -> Tensor:
    """Return one sample of noise, `count` times; always the same, since a build compares two calls."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).repeat(count, *[1] * len(shape))


@cache
def stub(height: int, width: int) -> Image.Image:
    """Return the fitted image that a stubbed decoder returns."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


class Device:
    """A device that all processes share by a file that holds the time when it is free."""

    def __init__(self) -> None:
        self._seconds = float(os.environ[ENCODER_MS]) / 1e3
        self._file = os.open(os.environ[DEVICE], os.O_RDWR | os.O_CREAT)
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


class Sleeping:
    """The own encoder; its samples are noise."""

    identity = "sleeping"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = Device()

    def layout(self, size: Sequence[int]) -> dict[str, int]:
        frames, height, width = size
        time = {} if frames == 1 else {"latent_t": 1 + (frames - 1) // FRAMES_FACTOR}
        return {"channel": CHANNELS, **time, "latent_y": height // FACTOR, "latent_x": width // FACTOR}

    def encode(self, pixels_N3TYX: Tensor) -> Tensor:
        """Encode and wait for the samples, as a plain loop does."""
        sleep_until(self._device.run(0.0))
        return noise(len(pixels_N3TYX), *self.layout(pixels_N3TYX.shape[2:]).values())


class SleepingEncoder(own.OwnFamilyEncoder):
    """The own encoder as the build sees it, which leaves the pixels as they are."""

    def encode(self, pixels_NTYX3: Tensor) -> Tensor:
        sleep_until(Device().run(0.0))
        return noise(len(pixels_NTYX3), *self.array(Size(*pixels_NTYX3.shape[1:4])).shape)


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


class SleepingRuntime(CudaRuntime):
    """A runtime with the device that sleeps, which encodes while the process does other work."""

    samples: Tensor
    """The noise that every batch gives."""

    def __init__(self) -> None:
        self._sleeper, self.current = Device(), Stream()

    def stream(self) -> Stream:
        return Stream()

    def event(self) -> Event:
        return Event(self)

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
            stream.done_at = self._sleeper.run(stream.done_at)

        return replay, self.samples


if multiprocessing.parent_process() is not None and DEVICE in os.environ:
    install()  # in a worker
