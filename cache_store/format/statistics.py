"""Derives the seal's statistics from the shards' sums, added up in order."""

from collections.abc import Iterable, Sequence

import numpy as np

from cache_store.format.schema import ArraySummary, FeatureStatistics, PreviewEquations, PreviewMap
from cache_store.format.sums import to_tuples

PREVIEW_RIDGE = 1e-6
"""Relative weight that keeps the fit defined where features are constant or few samples were seen."""

ROUNDING = 1e-9
"""Relative: sums over the same values in another order differ by less, up to some million million values."""


def equal_but_for_rounding(left: FeatureStatistics, right: FeatureStatistics) -> bool:
    """Whether two statistics may be of the same values, added up in another order."""
    if (left.count, left.minimum, left.maximum) != (right.count, right.minimum, right.maximum):
        return False
    squares = np.array(left.sum_of_squares)
    magnitudes = np.sqrt(left.count * squares)  # no less than the sum of all absolute values
    differences = np.abs(np.array(left.sum) - right.sum), np.abs(squares - right.sum_of_squares)
    return bool((differences[0] <= ROUNDING * magnitudes).all() and (differences[1] <= ROUNDING * squares).all())


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
