"""Comparing cached samples with their images encoded again."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cache_store.cache.writer import Outcome
from cache_store.format.schema import DTYPES, StoreDtype


@dataclass(frozen=True, kw_only=True)
class LatentDifference:
    """The difference between two latents of one image, each rounded to the stored dtype."""

    largest: float
    """Largest absolute difference of any value; infinite where the new latent is not finite."""
    beyond_rounding: float
    """Largest difference beyond what rounding can add to a stored value; large features are divided by their scale."""
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
    """The difference found; None if the image could not be compared."""
    source_problem: str | None
    """Why the image could not be compared: it is gone, changed or no longer decodable; None if it could."""

    @property
    def problem(self) -> str | None:
        """The problem with this sample; None if it matches."""
        if self.difference is None or self.difference.beyond_rounding <= self.tolerance:
            return self.source_problem
        return f"its latent differs by {self.difference.largest:.3g}; the limit is {self.tolerance:.3g} plus rounding"


def differences(
    cached: np.ndarray, encoded: np.ndarray, dtype: StoreDtype, scale: np.ndarray
) -> Iterator[LatentDifference]:
    """Compare stored latents of `dtype` with float32 latents, rounding the float32 latents to `dtype` first.

    `scale` is the result of `feature_scale`. Rounding moves a value by at most half a step of `dtype`, so it adds at
    most one step to a difference.
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
    return outcome.reason  # same bytes, but this version of a library cannot decode them
