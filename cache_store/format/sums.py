"""One pass over a batch of samples: rounded to the stored dtype, judged, summed up, checksummed.

In C where the machine that installed the package had a compiler: 32 latents of 16 x 28 x 28 take a ms there, and 9 in
numpy. Both give the same bits, since each sum is of float64 in one order:

- a feature's values of a sample fall in turn to LANES sums, which are then added in halves: 0 to 4, 1 to 5, ..., 0 to
  2, 1 to 3, 0 to 1; where features alternate (a tower's), all values of one fall to the first;
- the preview's products are added cell by cell, row by row, over every PREVIEW_STRIDE-th in both directions;
- samples' sums are added one after the other, so it does not matter in which batch a sample came.

Squares and products are exact in float64: no processor's fused addition rounds otherwise.
"""

# Axes: N samples, C features, O what lies before the feature axis, I behind it, L lanes, H W cells, 3 RGB.

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cache_store.format.codec import crc32c
from cache_store.format.schema import DTYPES, FeatureStatistics, PreviewEquations, SampleLayout, StoreDtype

LANES = 8

PREVIEW_STRIDE = 2
"""Every second cell in both directions enters the preview's fit: enough by far for 17 x 3 numbers."""

KINDS = tuple(DTYPES)
"""By number, as C has them."""

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
    """Add the samples that are `kept` and finite; `kept` becomes 0 where one is not finite.

    `samples`, float32, are rounded into `stored`, uint8 [N, bytes of a sample]; without them `stored` is taken as it
    is. `totals` [4, C] are sums, sums of squares, minima and maxima.
    """
    values_NB = stored.view(DTYPES[KINDS[kind]])
    if samples is not None:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite then is found below
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
            products = preview_products(values.reshape(-1, *cells), rgb[number])
            gram += products[:, : len(gram)]
            moment += products[:, len(gram) :]
        if checksums is not None:
            checksums[number] = crc32c(stored[number].tobytes())


def sum_in_lanes(values_OCI: NDArray[np.float64]) -> NDArray[np.float64]:
    """[C]. numpy adds along an axis that is not the last one after the other."""
    outer, features, inner = values_OCI.shape
    if inner == 1:
        return one_after_the_other(values_OCI.reshape(outer, features))
    padded = np.zeros((outer, features, -(-inner // LANES) * LANES))
    padded[:, :, :inner] = values_OCI
    steps = padded.reshape(outer, features, -1, LANES).transpose(0, 2, 1, 3)
    lanes_CL = one_after_the_other(steps.reshape(-1, features * LANES)).reshape(features, LANES)
    while (half := lanes_CL.shape[1] // 2) > 0:
        lanes_CL = lanes_CL[:, :half] + lanes_CL[:, half:]
    return lanes_CL[:, 0]


def one_after_the_other(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of the columns; a lone column is accumulated, since numpy would add it pairwise."""
    if rows.shape[1] == 1:
        return np.add.accumulate(rows[:, 0])[-1:] + 0.0
    sums: NDArray[np.float64] = np.add.reduce(np.ascontiguousarray(rows), axis=0, initial=0.0)
    return sums


def preview_products(latent_CHW: NDArray[np.float64], rgb_HW3: NDArray[np.float32]) -> NDArray[np.float64]:
    """Sums over cells of the products of [features, 1] with [features, 1, R, G, B]."""
    step = PREVIEW_STRIDE
    features = np.moveaxis(latent_CHW[:, ::step, ::step], 0, -1)
    cells = np.concatenate([features, np.ones((*features.shape[:2], 1)), rgb_HW3[::step, ::step]], axis=2)
    cells = cells.reshape(-1, cells.shape[2])
    side = len(latent_CHW) + 1
    return one_after_the_other((cells[:, :side, None] * cells[:, None]).reshape(len(cells), -1)).reshape(side, -1)


add_batch: Callable[..., None]
try:
    from cache_store.format._sums import add_batch
except ImportError:  # not built, or built for another machine
    add_batch = add_batch_by_numpy


class RunningSums:
    """Sums over one shard's cached samples for its commit record, added batch by batch."""

    def __init__(self, layout: SampleLayout, dtype: StoreDtype) -> None:
        shape, place, features = layout.shape, layout.feature_place, layout.num_features
        self._kind, self._dtype, self._shape = KINDS.index(dtype), DTYPES[dtype], shape
        self._layout = math.prod(shape[:place]), features, math.prod(shape[place + 1 :])
        self._cells = (shape[1], shape[2]) if layout.has_preview else (0, 0)
        self._totals = np.zeros((4, features))
        self._totals[2], self._totals[3] = np.inf, -np.inf
        self._gram: NDArray[np.float64] | None = None
        self._moment: NDArray[np.float64] | None = None
        if layout.has_preview:
            self._gram, self._moment = np.zeros((features + 1, features + 1)), np.zeros((features + 1, 3))
        self._count = 0
        """Of samples."""

    def round_and_add(
        self, samples: NDArray[np.float32], wanted: NDArray[np.bool_], rgb_NHW3: Array | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_], NDArray[np.uint32]]:
        """Add the wanted ones of float32 samples [N, *shape]; for a preview also of the images at the samples'
        resolution, RGB in [0, 1].

        Returns their stored bytes [N, bytes of a sample], which of them are wanted and finite in the stored dtype, and
        the crc32c of those.
        """
        number, sample_bytes = len(samples), math.prod(self._shape) * self._dtype.itemsize
        stored, checksums = np.empty((number, sample_bytes), np.uint8), np.zeros(number, np.uint32)
        kept = self._add(stored, np.ascontiguousarray(samples, np.float32), wanted, rgb_NHW3, checksums)
        return stored, kept, checksums

    def add(self, stored: NDArray[np.uint8]) -> None:
        """Add samples by their stored bytes [N, bytes of a sample]; leaves out the preview, and what is not finite."""
        self._add(stored, None, np.ones(len(stored), np.bool_), None, None)

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
        add_batch(self._kind, self._layout, self._cells, stored, samples, kept, self._totals, *preview, checksums)
        self._count += int(kept.sum())
        return kept.view(np.bool_)

    def statistics(self) -> FeatureStatistics | None:
        if not self._count:
            return None
        outer, _, inner = self._layout
        total, squares, minimum, maximum = (tuple(each) for each in self._totals.tolist())
        return FeatureStatistics(
            count=self._count * outer * inner, sum=total, sum_of_squares=squares, minimum=minimum, maximum=maximum
        )

    def preview(self) -> PreviewEquations | None:
        if self._gram is None or self._moment is None or not self._count:
            return None
        return PreviewEquations(gram=to_tuples(self._gram), moment=to_tuples(self._moment))


def to_tuples(matrix: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix.tolist())
