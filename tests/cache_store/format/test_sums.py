"""Sums over samples: equal bits in C and in numpy, for any batches."""

import itertools
import math
from typing import get_args

import msgspec
import numpy as np
import pytest

from cache_store.format import sums
from cache_store.format.array import ArraySpec, Size, StoreDtype
from cache_store.format.codec import crc32c
from cache_store.format.quantized import as_read, quantize
from cache_store.format.sums import LANES, PREVIEW_STRIDE, RunningSums, add_batch_by_numpy
from tests.make_cache import make_array, make_encoder

WAYS = sorted({sums.add_batch, add_batch_by_numpy}, key=lambda way: way.__name__)
"""Only numpy's if there was no compiler."""
SHAPES: dict[tuple[int, ...], tuple[str, ...]] = {
    **dict.fromkeys([(16, 28, 28), (3, 1, 1), (5, 7, 3), (1, 2, 9)], ("channel", "y", "x")),
    **dict.fromkeys([(16, 5, 8, 13), (3, 1, 7, 3), (2, 4, 1, 5)], ("channel", "t", "y", "x")),
    (9, 21): ("token", "feature"),
    (4, 3, 11): ("y", "feature", "x"),
    (1,): ("feature",),
}
"""Axes by shape; samples with channels have previews."""
CASES = pytest.mark.parametrize("shape", SHAPES, ids=str)


def array_of(shape: tuple[int, ...], dtype: StoreDtype) -> ArraySpec:
    axes, base = SHAPES[shape], make_array((1, 1, 1), "float16", "none", make_encoder(1, [0.0], [1.0]))
    feature = "channel" if "channel" in axes else "feature"
    fields = {"axes": axes, "feature_axis": feature, "features": shape[axes.index(feature)], "dtype": dtype}
    recipe = msgspec.structs.replace(base, **fields, has_preview=feature == "channel")
    return recipe.of_size(Size(1, 8, 8), shape)


def random_samples(shape: tuple[int, ...], number: int) -> np.ndarray:
    """Make samples of all magnitudes of float16, and smaller and larger ones; some values are not finite."""
    rng = np.random.default_rng(number)
    shape = (number, *shape)
    samples = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 14, shape)
    samples[rng.random(shape) < 0.05] = 0.0
    samples[rng.random(shape) < 0.05] *= -0.0
    samples = samples.astype(np.float32)
    for place, value in ((1, np.nan), (2, 1e9), (3, -np.inf)):
        samples[place].flat[-1] = value
    return samples


def random_rgb(array: ArraySpec, number: int) -> np.ndarray | None:
    if not array.has_preview:
        return None
    return np.random.default_rng(1).random((number, *array.preview_cells, 3)).astype(np.float32)


def summed(way, array, samples, rgb, batches):
    """Add batches of these sizes; return sums, stored bytes of kept samples, which are kept, and their checksums."""
    running, found = RunningSums(array, way), []
    wanted = np.arange(len(samples)) % 5 != 4
    starts = itertools.accumulate(batches, initial=0)
    for start, size in zip(starts, batches, strict=False):
        part = slice(start, start + size)
        found.append(running.round_and_add(samples[part], wanted[part], None if rgb is None else rgb[part]))
    stored, kept, checksums = (np.concatenate(parts) for parts in [*zip(*found, strict=True)][:3])
    return running, stored[kept].tobytes(), kept.tolist(), checksums[kept].tolist()


@pytest.mark.parametrize("dtype", get_args(StoreDtype))
@CASES
def test_c_and_numpy_give_the_same_bits_in_any_batches(shape, dtype):
    if dtype == "uint8" and SHAPES[shape][0] != "channel":
        pytest.skip("a token or a number has no scale")
    array, samples = array_of(shape, dtype), random_samples(shape, 12)
    rgb = random_rgb(array, 12)
    first, *others = (summed(way, array, samples, rgb, batches) for way in WAYS for batches in ([12], [1] * 12, [5, 7]))
    for other in others:
        assert other[1:] == first[1:]
        assert other[0].sums().data == first[0].sums().data
    read = as_read(samples, dtype)
    expected = [
        bool(np.isfinite(each).all()) and number % 5 != 4 for number, each in enumerate(read.astype(np.float32))
    ]
    rounded = quantize(samples)[0] if dtype == "uint8" else read
    stored = [each.tobytes() for each, is_kept in zip(rounded, expected, strict=True) if is_kept]
    assert first[1:] == (b"".join(stored), expected, [*map(crc32c, stored)])


@pytest.mark.parametrize("way", WAYS)
@CASES
def test_sums_are_added_in_the_order_that_is_written_down(way, shape):
    """The sums equal those of a loop over Python's floats."""
    array, rng = array_of(shape, "float32"), np.random.default_rng(0)
    samples = rng.standard_normal((3, *shape)).astype(np.float32)
    rgb = random_rgb(array, 3)
    running, *_ = summed(way, array, samples, rgb, [3])
    place, statistics = array.feature_place, running.sums()
    outer, inner = math.prod(shape[:place]), math.prod(shape[place + 1 :])
    for feature in range(array.features):
        total, squares = 0.0, 0.0
        for values in samples.reshape(3, outer, -1, inner)[:, :, feature].astype(float).tolist():
            lanes = [[0.0] * LANES, [0.0] * LANES]
            for at, value in (pair for row in values for pair in enumerate(row)):
                lanes[0][at % LANES] += value
                lanes[1][at % LANES] += value**2
            total, squares = total + halved(lanes[0]), squares + halved(lanes[1])
        assert (*statistics.totals[:2, feature].tolist(),) == (total, squares)
    if rgb is not None:
        product = 0.0
        for sample, colours in zip(samples.astype(float), rgb.astype(float), strict=True):
            of_sample = 0.0
            middle = sample[0, shape[1] // 2] if sample.ndim == 4 else sample[0]
            for y, x in itertools.product(*(range(0, side, PREVIEW_STRIDE) for side in array.preview_cells)):
                of_sample += float(middle[y, x]) * float(colours[y, x, 2])
            product += of_sample
        assert statistics.preview[0, array.features + 3] == product


def halved(lanes: list[float]) -> float:
    while len(lanes) > 1:
        lanes = [one + other for one, other in zip(lanes, lanes[len(lanes) // 2 :], strict=False)]
    return lanes[0]


@pytest.mark.parametrize("way", WAYS)
def test_no_kept_sample_leaves_no_sums(way):
    array, samples = array_of((16, 28, 28), "float16"), np.full((2, 16, 28, 28), np.inf, np.float32)
    running, stored, kept, _ = summed(way, array, samples, np.zeros((2, 28, 28, 3)), [2])
    assert (running.sums(), stored, kept) == (None, b"", [False, False])


@pytest.mark.skipif(len(WAYS) == 1, reason="needs a C compiler at installation")
def test_arrays_of_other_samples_are_refused():
    stored, kept, totals = np.zeros((2, 12), np.uint8), np.ones(2, np.uint8), np.zeros((4, 3))
    for arguments in (
        (3, (1, 3, 2), (0, 0), stored, None, kept, totals, None, None, None, None),
        (0, (1, 3, 3), (0, 0), stored, None, kept, totals, None, None, None, None),
        (0, (1, 3, 2), (0, 0), stored, np.zeros(11, np.float32), kept, totals, None, None, None, None),
        (0, (1, 3, 2), (0, 0), stored, None, kept, totals[:3], None, None, None, None),
        (0, (1, 3, 2), (1, 2), stored, None, kept, totals, np.zeros(12, np.float32), np.zeros((4, 4)), None, None),
        (0, (1, 3, 2), (1, 3), stored, None, kept, totals, np.zeros(18, np.float32), np.eye(4), np.ones((4, 3)), None),
        (0, (1, 3, 2), (0, 0), stored, None, kept, totals, np.zeros(0, np.float32), np.eye(4), np.ones((4, 3)), None),
        (0, (1, 3, 2), (0, 0), stored, None, kept, totals, None, None, None, np.zeros(1, np.uint32)),
        (0, (2**40, 2**40, 2**40), (0, 0), stored, None, kept, totals, None, None, None, None),
    ):
        with pytest.raises(ValueError, match="differ in the samples"):
            sums.add_batch(*arguments)
