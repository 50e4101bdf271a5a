"""Slots and streams, on a host in place of a GPU: the same samples as by a call, in few slots."""

import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from cache_store.format.array import ArraySpec, Size
from precompute.encode.device_feed import SLOTS, CudaRuntime, DirectFeed, StreamedFeed, feed_of
from precompute.images.fit import MID_GREY
from tests.make_cache import make_array, make_encoder

BATCH = 4


class Event:
    """An event that must be recorded before it is waited for."""

    def __init__(self) -> None:
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded

    def elapsed_time(self, other: "Event") -> float:
        assert self.is_recorded
        assert other.is_recorded
        return 20.0


class Stream:
    def wait_event(self, event: Event) -> None:
        assert event.is_recorded


class Host(CudaRuntime):
    """A device that is this processor, with or without graphs."""

    def __init__(self, captures: bool = True) -> None:
        self.captures, self.replays = captures, 0

    def pinned(self, shape, dtype):
        return torch.full(shape, 77, dtype=dtype)

    on_device = pinned
    stream = staticmethod(Stream)
    event = staticmethod(Event)

    def within(self, stream):
        return nullcontext()

    def capture(self, work, stream):
        if not self.captures:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more of it")
        result = torch.empty_like(work())

        def replay() -> None:
            self.replays += 1
            result.copy_(work())

        return replay, result


class Encoder:
    """An encoder whose samples depend only on their own image."""

    device, is_captured = torch.device("cpu"), True

    def __init__(self) -> None:
        self.batches: list[np.ndarray] = []

    def encode(self, pixels_NTYX3):
        self.batches.append(pixels_NTYX3.numpy().copy())
        means = pixels_NTYX3.float().mean((1, 2, 3, 4))
        return means[:, None, None, None].expand(-1, 2, 2, 3) * torch.arange(12.0).view(2, 2, 3)


def array_of(height: int, width: int) -> ArraySpec:
    recipe = make_array((2, 2, 3), "float16", "none", make_encoder(BATCH, [0.0] * 2, [1.0] * 2))
    return recipe.of_size(Size(1, height, width), (2, 2, 3))


ARRAY = array_of(16, 24)


def encode(feed, array, batch):
    """Encode a batch through a buffer of the feed, as a build does."""
    buffer = feed.buffers.take(array)
    buffer[: len(batch)] = batch
    return feed.encode(array, buffer, len(batch))


def directly(array, batch):
    return encode(DirectFeed(Encoder()), array, batch)()[0]


def batches_of(array, *sizes):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (size, *array.size, 3), np.uint8) for size in sizes]


@pytest.mark.parametrize("captures", [True, False])
def test_a_batch_through_slots_gives_the_samples_of_a_call(logged, captures):
    """A short batch is filled up with grey; without graphs, a warning says so."""
    encoder, host = Encoder(), Host(captures)
    feed = StreamedFeed(encoder, host)
    batches = batches_of(ARRAY, 4, 4, 1, 4, 3, 4, 2)
    for batch in batches:
        samples, seconds = encode(feed, ARRAY, batch)()
        np.testing.assert_array_equal(samples, directly(ARRAY, batch))
        assert seconds == 0.02
        assert len(encoder.batches[-1]) == BATCH
        assert (encoder.batches[-1][len(batch) :] == MID_GREY).all()
    assert host.replays == (len(batches) if captures else 0)
    assert ("CUDA graph" in logged.text) is not captures
    assert "and more of it" not in logged.text


def test_at_most_one_batch_per_slot_is_on_the_device():
    feed = StreamedFeed(Encoder(), Host())
    batches = batches_of(ARRAY, *[4] * (SLOTS + 1))
    ahead = [encode(feed, ARRAY, batch) for batch in batches[:SLOTS]]
    late = threading.Thread(target=lambda: ahead.append(encode(feed, ARRAY, batches[SLOTS])))
    late.start()
    late.join(0.05)
    assert late.is_alive(), "the thread did not wait for a slot"
    first, _ = ahead[0]()
    kept = first.copy()
    late.join(10)
    np.testing.assert_array_equal(first, kept, "the slot's next batch changed the samples")
    for encoding, batch in zip(ahead[1:], batches[1:], strict=True):
        np.testing.assert_array_equal(encoding()[0], directly(ARRAY, batch))


def test_slots_and_graph_are_made_anew_for_each_size():
    """Each size begins when all samples of the one before have arrived; buffers of another size are not kept."""
    wide, host = array_of(24, 48), Host()
    feed = StreamedFeed(Encoder(), host)
    for each in (ARRAY, ARRAY, wide, wide, ARRAY):
        (batch,) = batches_of(each, 3)
        buffer = feed.buffers.take(each)
        buffer[:3] = batch
        np.testing.assert_array_equal(feed.encode(each, buffer, 3)()[0], directly(each, batch))
        feed.buffers.give_back(buffer)
    assert host.replays == 5
    assert feed.buffers.take(wide).shape == (BATCH, 1, 24, 48, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_bytes_through_graph_and_slots():
    encoder = Encoder()
    encoder.encode = lambda image: image.to("cuda").float().mean((1, 2, 3, 4))[:, None, None, None].expand(-1, 2, 2, 3)
    encoder.device = torch.device("cuda", 0)
    feed = feed_of(encoder)
    assert isinstance(feed, StreamedFeed)
    for batch in batches_of(ARRAY, 4, 4, 4, 4, 2):
        samples, seconds = encode(feed, ARRAY, batch)()
        full = np.concatenate([batch, np.full((4 - len(batch), *batch.shape[1:]), MID_GREY, np.uint8)])
        np.testing.assert_array_equal(samples, encoder.encode(torch.from_numpy(full)).cpu().numpy()[: len(batch)])
        assert seconds > 0
