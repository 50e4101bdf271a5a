"""Find unusual samples of a cache from statistics of each sample, and make histograms of its features."""

# Axes: N samples, F features, M moments (F means, then F spreads), P values of a feature, B bins.

from dataclasses import dataclass

import numpy as np

from cache_store.cache.reader import Cache
from cache_store.format.array import ArraySpec
from cache_store.format.schema import ArraySummary
from cache_store.gallery.exhibits import SurveyDraw, batches
from cache_store.program.progress_bar import ProgressBar

MOST_FEATURES = 96
"""Most features examined; of more, evenly spaced ones: enough to tell an odd sample, and no VAE has more today."""
BINS = 80
HISTOGRAM_SPAN = 4.0
"""Standard deviations on either side of a feature's mean that the histograms show."""
READ_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class LatentSurvey:
    """Statistics of the samples drawn."""

    draw: SurveyDraw
    axis: str
    """Name of the feature axis, such as `channel`."""
    feature_F: np.ndarray
    """Numbers of the features that were examined."""
    moment_NM: np.ndarray
    edge_B: np.ndarray
    """Bounds of the histograms' bins, the same for every feature."""
    count_FB: np.ndarray


def survey_latents(cache: Cache, draw: SurveyDraw) -> LatentSurvey:
    """Read every sample drawn, once, in batches of bounded size."""
    array, features = cache.spec.array, chosen_features(cache.spec.array)
    edges = histogram_edges(cache.seal.array, features)
    counts = np.zeros((len(features), BINS), np.int64)
    moments = []
    size = max(1, READ_BYTES // (4 * array.sample_bytes))
    with ProgressBar("survey", len(draw.number_N), "sample") as bar:
        for numbers in batches(draw.number_N, size):
            stored = cache.read(numbers).take(features, array.feature_place + 1).astype(np.float32)
            value_NFP = np.moveaxis(stored, array.feature_place + 1, 1).reshape(*stored.shape[:1], len(features), -1)
            moments.append(sample_moments(value_NFP))
            for place, values in enumerate(np.moveaxis(value_NFP, 1, 0)):
                counts[place] += np.histogram(values, BINS, (edges[0], edges[-1]))[0]
            bar.update(len(numbers))
    return LatentSurvey(
        draw=draw,
        axis=array.feature_axis,
        feature_F=features,
        moment_NM=np.concatenate(moments),
        edge_B=edges,
        count_FB=counts,
    )


def chosen_features(array: ArraySpec) -> np.ndarray:
    """Choose all features of an array, or `MOST_FEATURES` evenly spaced ones of many."""
    shown = min(array.num_features, MOST_FEATURES)
    return np.arange(shown) * array.num_features // shown


def histogram_edges(summary: ArraySummary, features: np.ndarray) -> np.ndarray:
    """Return bin edges shared by all features: wide enough for each, but not beyond the smallest and largest value."""
    lists = (summary.mean, summary.std, summary.minimum, summary.maximum)
    mean, std, minimum, maximum = (np.array(each)[features] for each in lists)
    spread = HISTOGRAM_SPAN * std
    low = max((mean - spread).min(), minimum.min())
    high = min((mean + spread).max(), maximum.max())
    return np.linspace(low, high, BINS + 1) if high > low else np.linspace(low - 0.5, low + 0.5, BINS + 1)


def sample_moments(value_NFP: np.ndarray) -> np.ndarray:
    """Compute mean and standard deviation of each feature of each sample: [N, 2F], float64."""
    mean_NF = value_NFP.mean(-1, dtype=np.float64)
    # Nine times faster than numpy's std; float64 leaves enough digits of latents' small means.
    square_NF = np.einsum("nfp,nfp->nf", value_NFP, value_NFP, dtype=np.float64) / value_NFP.shape[-1]
    return np.concatenate([mean_NF, np.sqrt(np.maximum(square_NF - mean_NF**2, 0.0))], axis=1)


@dataclass(frozen=True, kw_only=True)
class Unusual:
    """A sample that stands out, and by what."""

    number: int
    distance: float
    """Mahalanobis distance of its moments from those of all samples surveyed."""
    why: str


def most_unusual(survey: LatentSurvey, rows: int) -> list[Unusual]:
    """Find the samples farthest from the rest, farthest first; ties in row order."""
    score_NM = standard_scores(survey.moment_NM)
    distance_N = mahalanobis(score_NM)
    order = np.argsort(-distance_N, kind="stable")[:rows]
    return [
        Unusual(
            number=int(survey.draw.number_N[place]),
            distance=float(distance_N[place]),
            why=largest_score(score_NM[place], survey),
        )
        for place in order
    ]


def standard_scores(moment_NM: np.ndarray) -> np.ndarray:
    """Scale each moment to mean 0 and deviation 1 over the samples; a constant one becomes 0."""
    deviation_M = moment_NM.std(0)
    score_NM: np.ndarray = (moment_NM - moment_NM.mean(0)) / np.where(deviation_M > 0, deviation_M, 1.0)
    return score_NM


def mahalanobis(score_NM: np.ndarray) -> np.ndarray:
    """Compute distances under the moments' correlation, which is shrunk towards none where samples are few.

    Unshrunk, N samples of N or more moments are all equally far from their mean.
    """
    samples, moments = score_NM.shape
    shrink = moments / (moments + samples)
    correlation_MM = (1 - shrink) * (score_NM.T @ score_NM) / samples + shrink * np.eye(moments)
    squared_N = np.einsum("nm,nm->n", score_NM, np.linalg.solve(correlation_MM, score_NM.T).T)
    distance_N: np.ndarray = np.sqrt(np.maximum(squared_N, 0.0))
    return distance_N


def largest_score(score_M: np.ndarray, survey: LatentSurvey) -> str:
    """Name the moment that deviates most."""
    largest, count = int(np.argmax(np.abs(score_M))), len(survey.feature_F)
    what = "mean" if largest < count else "spread"
    feature = survey.feature_F[largest % count]
    return f"{what} of {survey.axis} {feature} at {score_M[largest]:+.1f} σ".replace("-", "\N{MINUS SIGN}")
