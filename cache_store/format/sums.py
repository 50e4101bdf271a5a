"""Sum up samples in one pass per batch (round, check, add, checksum), and compute the seal's statistics from the sums.

The pass runs in C if there was a compiler at installation: 32 latents of 16 x 28 x 28 take 1 ms, and 9 ms in numpy.
Both give the same bits, since every sum is added in float64 in a fixed order:

- a feature's values in a sample are added in turn to LANES partial sums, which are then added in halves: 4 to 0, 5 to
  1, ..., 2 to 0, 3 to 1, 1 to 0; if the features are the last axis, as in a tower, one partial sum takes all values;
- the preview's products are added cell by cell, row by row, for every PREVIEW_STRIDE-th cell in both directions, and of
  a clip's T latent frames for frame T // 2 alone;
- the sums of samples are added in order, so that it does not matter in which batch a sample came.

Squares and products are exact in float64, so that a processor's fused multiply-add gives the same result.
"""

# Axes: N samples, C features, O values before the feature axis, I values after it, L lanes, T frames, H W cells,
# 3 RGB.

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache_store.format.array import DTYPES, ArraySpec
from cache_store.format.codec import crc32c
from cache_store.format.quantized import Scale, dequantize, quantize
from cache_store.format.schema import ArraySummary, PreviewMap

LANES = 8

PREVIEW_STRIDE = 2
"""The preview is fitted to every second cell in both directions: more than enough for 17 x 3 numbers."""

PREVIEW_RIDGE = 1e-6
"""Relative weight that keeps the fit defined where features are constant or few samples were seen."""

ROUNDING = 1e-9
"""Relative tolerance: sums of the same values in different orders differ by less, for up to about 10^12 values."""

KINDS = ("float16", "bfloat16", "float32")
"""Names of the dtypes, in the order of the numbers that the C code uses."""

Array = NDArray[np.generic]


def add_batch_by_numpy(
    kind: int,
    layout: tuple[int, int, int],
    cells: tuple[int, int],
    stored: Array,
    samples: NDArray[np.float32] | None,
    kept: NDArray[np.uint8],
    totals: NDArray[np.float64],
    rgb: NDArray[np.float32] | None,
    gram: NDArray[np.float64] | None,
    moment: NDArray[np.float64] | None,
    checksums: NDArray[np.uint32] | None,
) -> None:
    """Add the samples that are `kept` and finite; set `kept` to 0 for the others.

    Rounds `samples`, float32, into `stored`, uint8 [N, bytes of a sample]; without `samples`, `stored` already holds
    the values. `totals` [4, C] are sums, sums of squares, minima and maxima.
    """
    values_NB = stored.view(DTYPES[KINDS[kind]])
    if samples is not None:
        with np.errstate(over="ignore", invalid="ignore"):  # overflows are found below
            values_NB[:] = samples.reshape(values_NB.shape).astype(values_NB.dtype)
    for number in np.flatnonzero(kept):
        if not np.isfinite(values_NB[number]).all():
            kept[number] = 0
            continue
        values = values_NB[number].astype(np.float64).reshape(layout)
        totals[:2] += [sum_in_lanes(values), sum_in_lanes(values**2)]
        totals[2] = np.minimum(totals[2], values.min((0, 2))) + 0.0  # one zero, not two
        totals[3] = np.maximum(totals[3], values.max((0, 2))) + 0.0
        if rgb is not None and gram is not None and moment is not None:
            frames_CTHW = values.reshape(values.shape[1], -1, *cells)
            products = preview_products(frames_CTHW[:, frames_CTHW.shape[1] // 2], rgb[number])
            gram += products[:, : len(gram)]
            moment += products[:, len(gram) :]
        if checksums is not None:
            checksums[number] = crc32c(stored[number].tobytes())


def sum_in_lanes(values_OCI: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum values per feature: [C]. numpy adds in order along every axis but the last."""
    outer, features, inner = values_OCI.shape
    if inner == 1:
        return sum_rows_in_order(values_OCI.reshape(outer, features))
    padded = np.zeros((outer, features, -(-inner // LANES) * LANES))
    padded[:, :, :inner] = values_OCI
    steps = padded.reshape(outer, features, -1, LANES).transpose(0, 2, 1, 3)
    lanes_CL = sum_rows_in_order(steps.reshape(-1, features * LANES)).reshape(features, LANES)
    while (half := lanes_CL.shape[1] // 2) > 0:
        lanes_CL = lanes_CL[:, :half] + lanes_CL[:, half:]
    return lanes_CL[:, 0]


def sum_rows_in_order(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum the columns; a single column is accumulated, since numpy would add it pairwise."""
    if rows.shape[1] == 1:
        return np.add.accumulate(rows[:, 0])[-1:] + 0.0
    sums: NDArray[np.float64] = np.add.reduce(np.ascontiguousarray(rows), axis=0, initial=0.0)
    return sums


def preview_products(latent_CHW: NDArray[np.float64], rgb_HW3: NDArray[np.float32]) -> NDArray[np.float64]:
    """Sum the products of [features, 1] with [features, 1, R, G, B] over the cells."""
    step = PREVIEW_STRIDE
    features = np.moveaxis(latent_CHW[:, ::step, ::step], 0, -1)
    cells = np.concatenate([features, np.ones((*features.shape[:2], 1)), rgb_HW3[::step, ::step]], axis=2)
    cells = cells.reshape(-1, cells.shape[2])
    side = len(latent_CHW) + 1
    return sum_rows_in_order((cells[:, :side, None] * cells[:, None]).reshape(len(cells), -1)).reshape(side, -1)


add_batch: Callable[..., None]
try:
    from cache_store.format._sums import add_batch
except ImportError:  # not built, or built for another machine
    add_batch = add_batch_by_numpy


class Rounded(NamedTuple):
    """A batch as it is stored."""

    stored: NDArray[np.uint8]
    """[N, bytes of a sample]"""
    kept: NDArray[np.bool_]
    """Which samples are wanted, and finite when they are read back."""
    checksums: NDArray[np.uint32]
    """crc32c of the stored bytes of each kept sample."""
    scale: Scale | None
    """The scale of the codes, if samples are quantized."""


class ShardSums(NamedTuple):
    """Sums over a shard's cached samples, in float64; they are stored in the footer of its samples table."""

    num_values: int
    """Number of values per feature."""
    totals: NDArray[np.float64]
    """Sums, sums of squares, minima and maxima of the features: [4, C]."""
    preview: NDArray[np.float64] | None
    """Normal equations of the least-squares map from [features of a cell, 1] to RGB in [0, 1]: the left side, then R, G
    and B, [C + 1, C + 4]; None if the array has no preview, or a row is withdrawn."""

    @property
    def data(self) -> bytes:
        """Count, totals and preview, each row by row, as little-endian float64."""
        preview = [] if self.preview is None else [self.preview.ravel()]
        return np.concatenate([[self.num_values], self.totals.ravel(), *preview]).astype("<f8").tobytes()

    @classmethod
    def of_data(cls, data: bytes, features: int) -> "ShardSums":
        """Parse `data`; ValueError if its length does not fit the number of features."""
        values, ends = np.frombuffer(data, "<f8"), 1 + 4 * features
        if len(values) not in (ends, ends + (features + 1) * (features + 4)):
            raise ValueError(f"holds {len(values):,} sums, which are not those of {features:,} features")
        preview = values[ends:].reshape(features + 1, features + 4) if len(values) > ends else None
        return cls(int(values[0]), values[1:ends].reshape(4, features), preview)


class RunningSums:
    """Sums over one shard's cached samples, added batch by batch; the function `add` does the arithmetic."""

    def __init__(self, array: ArraySpec, add: Callable[..., None] = add_batch) -> None:
        self._add_batch, dtype = add, array.dtype
        shape, place, features = array.shape, array.feature_place, array.features
        self._is_quantized = dtype == "uint8"
        summed = "float32" if self._is_quantized else dtype
        self._kind, self._dtype, self._shape = KINDS.index(summed), DTYPES[summed], shape
        self._layout = math.prod(shape[:place]), features, math.prod(shape[place + 1 :])
        self._cells = array.preview_cells if array.has_preview else (0, 0)
        self._totals = np.zeros((4, features))
        self._totals[2], self._totals[3] = np.inf, -np.inf
        self._gram: NDArray[np.float64] | None = None
        self._moment: NDArray[np.float64] | None = None
        if array.has_preview:
            self._gram, self._moment = np.zeros((features + 1, features + 1)), np.zeros((features + 1, 3))
        self._count = 0
        """Number of samples."""

    def round_and_add(
        self,
        samples: NDArray[np.float32],
        wanted: NDArray[np.bool_],
        rgb_NHW3: Array | None,
    ) -> Rounded:
        """Round the samples of a batch, float32 [N, *shape], and add the wanted ones, as they are read back.

        An array with a preview also needs `rgb_NHW3`, RGB in [0, 1] at the samples' resolution: the images or, for
        clips, the frames at the middle latent frame.
        """
        samples, number = np.ascontiguousarray(samples, np.float32), len(samples)
        checksums = np.zeros(number, np.uint32)
        if not self._is_quantized:
            stored = np.empty((number, math.prod(self._shape) * self._dtype.itemsize), np.uint8)
            return Rounded(stored, self._add(stored, samples, wanted, rgb_NHW3, checksums), checksums, None)
        codes, scale = quantize(samples)
        kept = self._add(as_bytes(dequantize(codes, scale)), None, wanted, rgb_NHW3, None)
        stored = as_bytes(codes)
        checksums[kept] = [crc32c(each.data) for each in stored[kept]]
        return Rounded(stored, kept, checksums, scale)

    def add(self, values: Array) -> None:
        """Add finite samples as they are read [N, *shape]; the preview's equations stay as they are."""
        self._add(as_bytes(values), None, np.ones(len(values), np.bool_), None, None)

    def add_preview(self, other: ShardSums | None) -> None:
        if other and other.preview is not None and self._gram is not None and self._moment is not None:
            self._gram += other.preview[:, : len(self._gram)]
            self._moment += other.preview[:, len(self._gram) :]

    def _add(
        self,
        stored: NDArray[np.uint8],
        samples: NDArray[np.float32] | None,
        wanted: NDArray[np.bool_],
        rgb_NHW3: Array | None,
        checksums: NDArray[np.uint32] | None,
    ) -> NDArray[np.bool_]:
        kept = wanted.astype(np.uint8)
        preview: tuple[Array | None, ...] = None, None, None
        if self._gram is not None and rgb_NHW3 is not None:
            preview = np.ascontiguousarray(rgb_NHW3, np.float32), self._gram, self._moment
        self._add_batch(self._kind, self._layout, self._cells, stored, samples, kept, self._totals, *preview, checksums)
        self._count += int(kept.sum())
        return kept.view(np.bool_)

    def sums(self) -> ShardSums | None:
        """Return the sums so far; None if no sample was added."""
        if not self._count:
            return None
        outer, _, inner = self._layout
        preview = None
        if self._gram is not None and self._moment is not None:
            preview = np.concatenate([self._gram, self._moment], axis=1)
        return ShardSums(self._count * outer * inner, self._totals, preview)


def as_bytes(values: Array) -> NDArray[np.uint8]:
    """View contiguous samples [N, ...] as their bytes [N, bytes of a sample]."""
    return values.reshape(len(values), -1).view(np.uint8)


def to_tuples(matrix: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix.tolist())


def equal_but_for_rounding(left: ShardSums, right: ShardSums) -> bool:
    """Return whether statistics differ by no more than the rounding of another order of addition."""
    if left.num_values != right.num_values or not np.array_equal(left.totals[2:], right.totals[2:]):
        return False
    total_C, squares_C = np.abs(left.totals[:2] - right.totals[:2])
    magnitude_C = np.sqrt(left.num_values * left.totals[1])  # no less than the sum of all absolute values
    return bool((total_C <= ROUNDING * magnitude_C).all() and (squares_C <= ROUNDING * left.totals[1]).all())


def summarise(sums: Sequence[ShardSums], stored_bytes: int) -> ArraySummary:
    """Combine the shards' sums, in the order given; at least one shard must have cached samples."""
    count = sum(each.num_values for each in sums)
    mean, mean_square = sum_in_order(each.totals[:2] for each in sums) / count
    previews = [each.preview for each in sums if each.preview is not None]
    return ArraySummary(
        bytes=stored_bytes,
        mean=tuple(mean.tolist()),
        std=tuple(np.sqrt(np.maximum(mean_square - mean**2, 0.0)).tolist()),
        minimum=tuple(np.min([each.totals[2] for each in sums], axis=0).tolist()),
        maximum=tuple(np.max([each.totals[3] for each in sums], axis=0).tolist()),
        preview=fit_preview(previews) if previews else None,
    )


def sum_in_order(terms: Iterable[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Add the terms in order, so that the rounding is always the same."""
    total = np.zeros(())
    for term in terms:
        total = total + term
    return total


def fit_preview(equations: Sequence[NDArray[np.float64]]) -> PreviewMap:
    """Solve the ridge least squares; the solution is [features + 1, 3], with the bias in the last row."""
    whole = sum_in_order(equations)
    gram, moment = whole[:, : len(whole)], whole[:, len(whole) :]
    ridge = PREVIEW_RIDGE * np.diag(np.diag(gram) + np.diag(gram).mean())
    solution = np.linalg.solve(gram + ridge, moment).astype(np.float64)
    return PreviewMap(weight=to_tuples(solution[:-1].T), bias=tuple(solution[-1].tolist()))
