"""Sums over samples: equal bits for any batches."""

import itertools
from typing import get_args

import msgspec
import numpy as np
import pytest

from cache_store.format.array import ArraySpec, Size, StoreDtype
from cache_store.format.codec import crc32c
from cache_store.format.quantized import as_read, quantize
from cache_store.format.sums import RunningSums
from tests.make_cache import make_array, make_encoder

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


def summed(array, samples, rgb, batches):
    """Add batches of these sizes; return sums, stored bytes of kept samples, which are kept, and their checksums."""
    running, found = RunningSums(array), []
    wanted = np.arange(len(samples)) % 5 != 4
    starts = itertools.accumulate(batches, initial=0)
    for start, size in zip(starts, batches, strict=False):
        part = slice(start, start + size)
        found.append(running.round_and_add(samples[part], wanted[part], None if rgb is None else rgb[part]))
    stored, kept, checksums = (np.concatenate(parts) for parts in [*zip(*found, strict=True)][:3])
    return running, stored[kept].tobytes(), kept.tolist(), checksums[kept].tolist()


@pytest.mark.parametrize("dtype", get_args(StoreDtype))
@CASES
def test_batches_of_any_sizes_give_the_same_bits(shape, dtype):
    if dtype == "uint8" and SHAPES[shape][0] != "channel":
        pytest.skip("a token or a number has no scale")
    array, samples = array_of(shape, dtype), random_samples(shape, 12)
    rgb = random_rgb(array, 12)
    first, *others = (summed(array, samples, rgb, batches) for batches in ([12], [1] * 12, [5, 7]))
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
