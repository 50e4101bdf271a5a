"""Count how often each value of a feature occurs, over all samples of a small cache or a draw of a large one."""

# Axes: N samples, F features, P values of a feature, B bins.

from dataclasses import dataclass

import numpy as np

from cache_store.cache.reader import Cache
from cache_store.format.array import ArrayRecipe
from cache_store.format.schema import ArraySummary
from cache_store.gallery.exhibits import SampleDraw, batches
from cache_store.program.progress_bar import ProgressBar

MOST_FEATURES = 96
"""Most features shown; no VAE has more today. If there are more, evenly spaced ones are shown."""
BINS = 80
HISTOGRAM_SPAN = 4.0
"""Standard deviations on either side of a feature's mean that the histograms show."""
READ_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Histograms:
    """Counts of values of the samples drawn."""

    draw: SampleDraw
    feature_F: np.ndarray
    """Numbers of the features that are shown."""
    edge_B: np.ndarray
    """Bounds of the bins, the same for every feature."""
    count_FB: np.ndarray


def count_values(cache: Cache, draw: SampleDraw) -> Histograms:
    """Read every sample drawn, once, in batches of bounded size."""
    array, features = cache.spec.array, chosen_features(cache.spec.array)
    edges = histogram_edges(cache.seal.array, features)
    counts = np.zeros((len(features), BINS), np.int64)
    with ProgressBar("histograms", len(draw.number_N), "sample") as bar:
        for numbers in batches(cache, draw.number_N, lambda sized: max(1, READ_BYTES // (4 * sized.sample_bytes))):
            stored = cache.read(numbers).take(features, array.feature_place + 1).astype(np.float32)
            for place, values in enumerate(np.moveaxis(stored, array.feature_place + 1, 0)):
                counts[place] += np.histogram(values, BINS, (edges[0], edges[-1]))[0]
            bar.update(len(numbers))
    return Histograms(draw=draw, feature_F=features, edge_B=edges, count_FB=counts)


def chosen_features(array: ArrayRecipe) -> np.ndarray:
    """Choose all features of an array, or `MOST_FEATURES` evenly spaced ones of many."""
    shown = min(array.features, MOST_FEATURES)
    return np.arange(shown) * array.features // shown


def histogram_edges(summary: ArraySummary, features: np.ndarray) -> np.ndarray:
    """Return bin edges shared by all features: wide enough for each, but not beyond the smallest and largest value."""
    lists = (summary.mean, summary.std, summary.minimum, summary.maximum)
    mean, std, minimum, maximum = (np.array(each)[features] for each in lists)
    spread = HISTOGRAM_SPAN * std
    low = max((mean - spread).min(), minimum.min())
    high = min((mean + spread).max(), maximum.max())
    return np.linspace(low, high, BINS + 1) if high > low else np.linspace(low - 0.5, low + 0.5, BINS + 1)
