"""Round a batch as it is stored, and sum up its samples: the seal's statistics come from the sums of shards.

Sums are made in float64, of one sample after the other, so that it does not matter in which batch a sample came.
"""

# Axes: N samples, C features, O values before the feature axis, I values after it, T frames, H W cells, 3 RGB.

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache_store.format.array import DTYPES, ArraySpec
from cache_store.format.codec import crc32c
from cache_store.format.quantized import Scale, dequantize, quantize
from cache_store.format.schema import ArraySummary, PreviewMap

PREVIEW_STRIDE = 2
"""The preview is fitted to every second cell in both directions: more than enough for 17 x 3 numbers."""

PREVIEW_RIDGE = 1e-6
"""Relative weight that keeps the fit defined where features are constant or few samples were seen."""

ROUNDING = 1e-9
"""Relative tolerance: sums of the same values in different orders differ by less, for up to about 10^12 values."""

Array = NDArray[np.generic]


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
    """Sums over one shard's cached samples, added batch by batch."""

    def __init__(self, array: ArraySpec) -> None:
        shape, place, features = array.shape, array.feature_place, array.features
        self._is_quantized = array.dtype == "uint8"
        self._dtype = DTYPES["float32" if self._is_quantized else array.dtype]
        self._layout = math.prod(shape[:place]), features, math.prod(shape[place + 1 :])
        self._cells = array.preview_cells if array.has_preview else (0, 0)
        self._totals = np.zeros((4, features))
        self._totals[2], self._totals[3] = np.inf, -np.inf
        self._preview = np.zeros((features + 1, features + 4)) if array.has_preview else None
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
        samples, scale = np.ascontiguousarray(samples, np.float32), None
        if self._is_quantized:
            rounded, scale = quantize(samples)
            values = dequantize(rounded, scale)
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # overflows are found as they are added
                values = rounded = samples.astype(self._dtype)
        kept = self._add(values, wanted, rgb_NHW3)
        stored, checksums = as_bytes(rounded), np.zeros(len(samples), np.uint32)
        checksums[kept] = [crc32c(each.data) for each in stored[kept]]
        return Rounded(stored, kept, checksums, scale)

    def add(self, values: Array) -> None:
        """Add finite samples as they are read [N, *shape]; the preview's equations stay as they are."""
        self._add(values, np.ones(len(values), np.bool_), None)

    def add_preview(self, other: ShardSums | None) -> None:
        if other and other.preview is not None and self._preview is not None:
            self._preview += other.preview

    def _add(self, values: Array, wanted: NDArray[np.bool_], rgb_NHW3: Array | None) -> NDArray[np.bool_]:
        """Add the wanted samples that are finite; return which these are, [N]."""
        kept = wanted.copy()
        for number in np.flatnonzero(wanted):
            sample_OCI = values[number].astype(np.float64).reshape(self._layout)
            total_C = sample_OCI.sum((0, 2))
            if not np.isfinite(total_C).all():
                kept[number] = False
                continue
            self._totals[:2] += [total_C, (sample_OCI**2).sum((0, 2))]
            self._totals[2] = np.minimum(self._totals[2], sample_OCI.min((0, 2))) + 0.0  # one zero, not two
            self._totals[3] = np.maximum(self._totals[3], sample_OCI.max((0, 2))) + 0.0
            if self._preview is not None and rgb_NHW3 is not None:
                frames_CTHW = sample_OCI.reshape(sample_OCI.shape[1], -1, *self._cells)
                self._preview += preview_products(frames_CTHW[:, frames_CTHW.shape[1] // 2], rgb_NHW3[number])
            self._count += 1
        return kept

    def sums(self) -> ShardSums | None:
        outer, _, inner = self._layout
        return ShardSums(self._count * outer * inner, self._totals, self._preview) if self._count else None


def preview_products(latent_CHW: NDArray[np.float64], rgb_HW3: Array) -> NDArray[np.float64]:
    """Sum the products of [features, 1] with [features, 1, R, G, B] over the cells."""
    step = PREVIEW_STRIDE
    features = latent_CHW[:, ::step, ::step].reshape(len(latent_CHW), -1)
    rgb = rgb_HW3[::step, ::step].astype(np.float64).reshape(-1, 3)
    cells = np.concatenate([features, np.ones((1, features.shape[1])), rgb.T])
    products: NDArray[np.float64] = np.einsum("ik,jk->ij", cells[:-3], cells)  # BLAS' bits depend on its threads
    return products


def as_bytes(values: Array) -> NDArray[np.uint8]:
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


def summarise(sums: Iterable[ShardSums], stored_bytes: int) -> ArraySummary:
    """Combine the shards' sums, in the order given, so that the rounding is always the same; there must be one."""
    count, totals, equations = 0, None, None
    for each in sums:
        count += each.num_values
        if totals is None:
            totals = each.totals.copy()
        else:
            totals[:2] += each.totals[:2]
            totals[2] = np.minimum(totals[2], each.totals[2])
            totals[3] = np.maximum(totals[3], each.totals[3])
        if each.preview is not None:
            equations = each.preview.copy() if equations is None else equations + each.preview
    assert totals is not None, "no cached samples"
    mean, mean_square = totals[:2] / count
    return ArraySummary(
        bytes=stored_bytes,
        mean=tuple(mean.tolist()),
        std=tuple(np.sqrt(np.maximum(mean_square - mean**2, 0.0)).tolist()),
        minimum=tuple(totals[2].tolist()),
        maximum=tuple(totals[3].tolist()),
        preview=None if equations is None else fit_preview(equations),
    )


def fit_preview(whole: NDArray[np.float64]) -> PreviewMap:
    """Solve the ridge least squares; the solution is [features + 1, 3], with the bias in the last row."""
    gram, moment = whole[:, : len(whole)], whole[:, len(whole) :]
    ridge = PREVIEW_RIDGE * np.diag(np.diag(gram) + np.diag(gram).mean())
    solution = np.linalg.solve(gram + ridge, moment).astype(np.float64)
    return PreviewMap(weight=to_tuples(solution[:-1].T), bias=tuple(solution[-1].tolist()))
