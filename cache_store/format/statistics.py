"""Running sums over latents, exact to add up over shards in order, and what the seal derives from them.

numpy's own loops (einsum, pairwise sum) rather than BLAS: their result does not depend on a thread count.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from cache_store.format.schema import ArraySummary, FeatureStatistics, PreviewEquations, PreviewMap, SampleLayout

PREVIEW_STRIDE = 2
"""Every second cell in both directions enters the preview's fit: enough by far for 17 x 3 numbers."""

PREVIEW_RIDGE = 1e-6
"""Relative weight that keeps the fit defined where features are constant or few samples were seen."""


ROUNDING = 1e-9
"""Relative: sums over the same values in another order differ by less, up to some million million values."""


class FeatureSums:
    """Sums over every value of the samples added, per feature."""

    def __init__(self, layout: SampleLayout) -> None:
        self._others = tuple(axis for axis in range(len(layout.shape)) if axis != layout.feature_place)
        """The axes summed over."""
        self._values = math.prod(layout.shape) // layout.num_features
        """Of a feature in one sample."""
        self._count = 0
        self._sums: list[np.ndarray] = []

    def add(self, stored: np.ndarray) -> None:
        """Add one sample; in a large one, float64 of a whole batch would leave the cache and take gigabytes."""
        values = stored.astype(np.float64)
        axes = self._others
        sums = [values.sum(axes), (values**2).sum(axes), values.min(axes), values.max(axes)]
        if self._count:
            total, squares, minimum, maximum = self._sums
            sums = [total + sums[0], squares + sums[1], np.minimum(minimum, sums[2]), np.maximum(maximum, sums[3])]
        self._sums = sums
        self._count += self._values

    def statistics(self) -> FeatureStatistics | None:
        if not self._count:
            return None
        total, squares, minimum, maximum = (tuple(each.tolist()) for each in self._sums)
        return FeatureStatistics(count=self._count, sum=total, sum_of_squares=squares, minimum=minimum, maximum=maximum)


def equal_but_for_rounding(left: FeatureStatistics, right: FeatureStatistics) -> bool:
    """Whether two statistics may be of the same values, added up in another order."""
    if (left.count, left.minimum, left.maximum) != (right.count, right.minimum, right.maximum):
        return False
    squares = np.array(left.sum_of_squares)
    magnitudes = np.sqrt(left.count * squares)  # no less than the sum of all absolute values
    differences = np.abs(np.array(left.sum) - right.sum), np.abs(squares - right.sum_of_squares)
    return bool((differences[0] <= ROUNDING * magnitudes).all() and (differences[1] <= ROUNDING * squares).all())


class RunningStatistics:
    """What a commit record says of one shard's cached samples, added batch by batch."""

    # Axes: N samples, C channels, H W latent cells.

    def __init__(self, layout: SampleLayout) -> None:
        self._sums, self._has_preview = FeatureSums(layout), layout.has_preview
        self._gram = self._moment = np.zeros(())

    def add(self, stored: np.ndarray, rgb_NHW3: np.ndarray | None) -> None:
        """Add stored samples [N, *shape]; for a preview also the images at the samples' resolution, RGB in [0, 1]."""
        for sample in stored:
            self._sums.add(sample)
        if self._has_preview and len(stored):
            assert rgb_NHW3 is not None
            self._add_preview(stored, rgb_NHW3)

    def _add_preview(self, latent_NCHW: np.ndarray, rgb_NHW3: np.ndarray) -> None:
        step = PREVIEW_STRIDE
        cells = np.moveaxis(latent_NCHW[:, :, ::step, ::step], 1, -1).reshape(-1, latent_NCHW.shape[1])
        cells = cells.astype(np.float64)
        inputs = np.concatenate([cells, np.ones((len(cells), 1))], axis=1)
        targets = rgb_NHW3[:, ::step, ::step].astype(np.float64).reshape(-1, 3)
        self._gram = self._gram + np.einsum("ni,nj->ij", inputs, inputs)
        self._moment = self._moment + np.einsum("ni,nj->ij", inputs, targets)

    def statistics(self) -> FeatureStatistics | None:
        return self._sums.statistics()

    def preview(self) -> PreviewEquations | None:
        if not self._gram.ndim:
            return None
        return PreviewEquations(gram=to_tuples(self._gram), moment=to_tuples(self._moment))


def to_tuples(matrix: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix.tolist())


def summarise(
    statistics: Sequence[FeatureStatistics], previews: Sequence[PreviewEquations], stored_bytes: int
) -> ArraySummary:
    """Roll shards' sums up, in the order given; at least one shard must have cached samples."""
    count = sum(each.count for each in statistics)
    mean = sum_in_order(each.sum for each in statistics) / count
    mean_square = sum_in_order(each.sum_of_squares for each in statistics) / count
    return ArraySummary(
        bytes=stored_bytes,
        mean=tuple(mean.tolist()),
        std=tuple(np.sqrt(np.maximum(mean_square - mean**2, 0.0)).tolist()),
        minimum=tuple(np.min([each.minimum for each in statistics], axis=0).tolist()),
        maximum=tuple(np.max([each.maximum for each in statistics], axis=0).tolist()),
        preview=fit_preview(previews) if previews else None,
    )


def sum_in_order(terms: Iterable[object]) -> np.ndarray:
    """One after the other, so that the rounding is always the same."""
    total = np.zeros(())
    for term in terms:
        total = total + np.array(term)
    return total


def fit_preview(equations: Sequence[PreviewEquations]) -> PreviewMap:
    """Ridge least squares; the solution is [features + 1, 3], the bias in the last row."""
    gram = sum_in_order(each.gram for each in equations)
    moment = sum_in_order(each.moment for each in equations)
    ridge = PREVIEW_RIDGE * np.diag(np.diag(gram) + np.diag(gram).mean())
    solution = np.linalg.solve(gram + ridge, moment)
    return PreviewMap(weight=to_tuples(solution[:-1].T), bias=tuple(solution[-1].tolist()))
