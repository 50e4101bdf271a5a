"""Feed batches to an encoder's device and take samples back: by a call on a CPU, through streams on a GPU.

On a GPU, images are decoded into pinned memory. A batch is uploaded on one stream, encoded on another and downloaded on
a third. Events order the streams, so that the next batch is uploaded while one is encoded. The encoder's work is
captured once as a CUDA graph and replayed: one launch instead of hundreds, which Python's lock would delay. So shapes
are static: a short batch is filled with grey or padding.
"""

import queue
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache_store.format.array import ArraySpec
from cache_store.log import log_warning
from precompute.encode.batches import InputBuffers, batch_shape, make_buffer
from precompute.encoders.encoder import Encoder
from precompute.inputs.reader import Inputs, inputs_of

# Axes: N images of a batch, B of a full one, Y X pixels, 3 RGB.


SLOTS = 3
"""Batches on the device: one is uploaded, one encoded, one downloaded and written."""

WARM_UPS = 2
"""Runs before a capture: in the first ones, libraries allocate memory and choose algorithms."""


Encoding = Callable[[], tuple[np.ndarray, float]]
"""A batch given to the device. Call it once: it waits for the samples, float32 [N, *shape], and the seconds that the
device worked on them.
"""


class DirectFeed:
    """Encodes in the calling thread."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self.buffers = encoder, InputBuffers(make_buffer)

    def encode(self, array: ArraySpec, buffer: Inputs, count: int) -> Encoding:
        started = time.monotonic()
        values = self._encoder.encode(torch.from_numpy(buffer[:count])).cpu().numpy()
        seconds = time.monotonic() - started
        return lambda: (values, seconds)


class CudaRuntime:
    """A GPU with streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def on_device(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def within(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def capture(self, work: Callable[[], Tensor], stream: Any) -> tuple[Callable[[], object], Tensor]:
        """Capture the work; return what runs it again, and the tensor that then holds its result."""
        with self.within(stream):
            for _ in range(WARM_UPS):
                work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = work()
        return graph.replay, result


class Slot:
    """Memory for one batch: inputs on the device, samples there, and samples in pinned memory."""

    def __init__(self, runtime: CudaRuntime, inputs: Tensor, samples: tuple[int, ...]) -> None:
        self.inputs = runtime.on_device(tuple(inputs.shape), inputs.dtype)
        self.samples, self.result = runtime.on_device(samples, torch.float32), runtime.pinned(samples, torch.float32)
        self.uploaded, self.began, self.encoded, self.downloaded = (runtime.event() for _ in range(4))


class StreamedFeed:
    """Feeds a device through streams; `encode` waits while all slots are in use, so another thread takes samples.

    Slots and graph are those of one size; for a batch of another one, they are made anew.
    """

    def __init__(self, encoder: Encoder, runtime: CudaRuntime) -> None:
        self._encoder, self._runtime = encoder, runtime
        self.buffers = InputBuffers(self._pinned_buffer)
        self._upload, self._compute, self._download = (runtime.stream() for _ in range(3))
        self._array: ArraySpec | None = None
        self._graph: tuple[Callable[[], object], Tensor] | None = None
        """What runs the captured work again, and the tensor that then holds its result."""
        self._free = queue.SimpleQueue[Slot]()

    def _pinned_buffer(self, array: ArraySpec) -> Inputs:
        buffer: Inputs = self._runtime.pinned(batch_shape(array), torch_dtype(inputs_of(array).dtype)).numpy()
        return buffer

    def _prepare(self, array: ArraySpec) -> None:
        """Make slots and graph for batches of this array, once all of the one before have arrived."""
        if self._array is not None:
            for _ in range(SLOTS):
                self._free.get()
        self._array, shape, (_, kind, self._filler) = array, batch_shape(array), inputs_of(array)
        self._graph = None  # free the old graph's memory before the new one takes its own
        self._input = self._runtime.on_device(shape, torch_dtype(kind))
        self._input.fill_(self._filler)
        if self._encoder.is_captured:
            self._graph = self._capture()
        for _ in range(SLOTS):
            self._free.put(Slot(self._runtime, self._input, (len(self._input), *array.shape)))

    def _capture(self) -> tuple[Callable[[], object], Tensor] | None:
        """Capture the encoder's work as a graph; warn if that fails."""
        try:
            return self._runtime.capture(lambda: self._encoder.encode(self._input), self._compute)
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
            log_warning(
                f"the encoder's work cannot be captured as a CUDA graph; each batch launches it anew: {problem}"
            )
            return None

    def _encoded(self) -> Tensor:
        if self._graph is None:
            return self._encoder.encode(self._input)
        replay, output = self._graph
        replay()
        return output

    def encode(self, array: ArraySpec, buffer: Inputs, count: int) -> Encoding:
        """Give the device the first `count` inputs of a buffer, which is free once the samples have arrived."""
        if array != self._array:
            self._prepare(array)
        slot, within = self._free.get(), self._runtime.within
        buffer[count:] = self._filler
        with within(self._upload):
            slot.inputs.copy_(torch.from_numpy(buffer), non_blocking=True)
            slot.uploaded.record()
        with within(self._compute):
            self._compute.wait_event(slot.uploaded)
            slot.began.record()
            self._input.copy_(slot.inputs)
            slot.samples.copy_(self._encoded())
            slot.encoded.record()
        with within(self._download):
            self._download.wait_event(slot.encoded)
            slot.result.copy_(slot.samples, non_blocking=True)
            slot.downloaded.record()

        def samples() -> tuple[np.ndarray, float]:
            slot.downloaded.synchronize()
            values, seconds = slot.result[:count].numpy().copy(), slot.began.elapsed_time(slot.encoded) / 1e3
            self._free.put(slot)
            return values, seconds

        return samples


def torch_dtype(kind: type[np.integer[Any]]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, kind)).dtype


DeviceFeed = DirectFeed | StreamedFeed


def feed_of(encoder: Encoder) -> DeviceFeed:
    if encoder.device.type == "cuda":
        return StreamedFeed(encoder, CudaRuntime(encoder.device))
    return DirectFeed(encoder)
