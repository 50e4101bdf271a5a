"""Comparing cached samples with their images encoded again."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cache_store.cache.writing.writer import Outcome
from cache_store.format.schema import DTYPES, StoreDtype


@dataclass(frozen=True, kw_only=True)
class LatentDifference:
    """How far two latents of one image differ, each rounded to the stored dtype."""

    largest: float
    """Largest absolute difference of any value; infinite where the new latent is not finite."""
    beyond_rounding: float
    """The same, less the most that rounding to the stored dtype can add, and of large features by their scale."""
    equal_bits: bool


@dataclass(frozen=True, kw_only=True)
class ComparedSample:
    """A cached sample, compared with its image encoded again."""

    number: int
    """Sample number, as `cache.read` takes it."""
    shard: int
    row: int
    id: str
    tolerance: float
    """The largest difference beyond rounding that is allowed."""
    difference: LatentDifference | None
    """None where the image is not the one encoded."""
    source_problem: str | None
    """Why it is not: the image is gone or changed."""

    @property
    def problem(self) -> str | None:
        """What is wrong with the sample; None if it matches."""
        if self.difference is None or self.difference.beyond_rounding <= self.tolerance:
            return self.source_problem
        return f"its latent differs by {self.difference.largest:.3g}; {self.tolerance:.3g} and rounding are allowed"


def differences(
    cached: np.ndarray, encoded: np.ndarray, dtype: StoreDtype, scale: np.ndarray
) -> Iterator[LatentDifference]:
    """Compare stored latents of `dtype` with float32 ones, which are rounded here as the store does.

    `scale` is that of features, as `feature_scale` gives it.
    A value was rounded by up to half a step of `dtype` at its magnitude, so rounding adds one step at most.
    """
    with np.errstate(over="ignore"):  # an overflow is an infinite difference below
        all_rounded = encoded.astype(DTYPES[dtype])
    for stored, rounded in zip(cached, all_rounded, strict=True):
        known = np.where(np.isfinite(rounded), rounded, stored)
        step = np.spacing(np.maximum(np.abs(stored), np.abs(known))).astype(np.float64)
        distance = np.abs(stored.astype(np.float64) - known.astype(np.float64))
        distance[~np.isfinite(rounded)] = np.inf
        yield LatentDifference(
            largest=float(distance.max()),
            beyond_rounding=float((np.maximum(distance - step, 0.0) / scale).max()),
            equal_bits=stored.tobytes() == rounded.tobytes(),
        )


def source_problem(content_sha256: str, outcome: Outcome) -> str | None:
    """Say why the image is not the one that was encoded; None if it is."""
    if outcome.content_sha256 is None:
        return f"its image is gone: {outcome.reason}"
    if outcome.content_sha256 != content_sha256:
        return f"its image changed: sha256 is {outcome.content_sha256[:12]}…, was {content_sha256[:12]}…"
    return outcome.reason  # the same bytes, that another version of a library does not decode
