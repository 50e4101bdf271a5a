"""One cached sample against its image encoded again: equal, near enough, too far apart, or of another image."""

# Axes: N samples of a batch, C latent channels, H W latent cells.

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cache_store.cache.writer import Outcome
from cache_store.format.schema import DTYPES, StoreDtype


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Between two latents of one image, each rounded to the stored dtype."""

    largest: float
    """Of any value, absolute; infinite where the new latent is not finite."""
    beyond_rounding: float
    """The same, less what rounding to the stored dtype can add."""
    equal_bits: bool


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A cached sample against its image encoded again."""

    number: int
    """Sample number, as `cache.read` takes it."""
    shard: int
    row: int
    id: str
    tolerance: float
    """The largest difference beyond rounding that is allowed."""
    difference: Difference | None
    """None where the image is not the one encoded."""
    source_problem: str | None
    """Why it is not."""

    @property
    def problem(self) -> str | None:
        """What must not be."""
        if self.difference is None or self.difference.beyond_rounding <= self.tolerance:
            return self.source_problem
        return f"its latent differs by {self.difference.largest:.3g}; {self.tolerance:.3g} and rounding are allowed"


def differences(stored_NCHW: np.ndarray, latent_NCHW: np.ndarray, dtype: StoreDtype) -> Iterator[Difference]:
    """Stored latents, of `dtype`, against float32 ones that are rounded here as the store does.

    A value was rounded by up to half a step of `dtype` at its magnitude, so rounding parts two by a step at most.
    """
    with np.errstate(over="ignore"):  # an overflow is an infinite difference below
        rounded_NCHW = latent_NCHW.astype(DTYPES[dtype])
    for stored, rounded in zip(stored_NCHW, rounded_NCHW, strict=True):
        known = np.where(np.isfinite(rounded), rounded, stored)
        step = np.spacing(np.maximum(np.abs(stored), np.abs(known))).astype(np.float64)
        distance = np.abs(stored.astype(np.float64) - known.astype(np.float64))
        distance[~np.isfinite(rounded)] = np.inf
        yield Difference(
            largest=float(distance.max()),
            beyond_rounding=float(np.maximum(distance - step, 0.0).max()),
            equal_bits=stored.tobytes() == rounded.tobytes(),
        )


def source_problem(content_sha256: str, outcome: Outcome) -> str | None:
    """Why an image that was encoded once is not that image now, if so."""
    if outcome.content_sha256 is None:
        return f"its image is gone: {outcome.reason}"
    if outcome.content_sha256 != content_sha256:
        return f"its image changed: sha256 is {outcome.content_sha256[:12]}…, was {content_sha256[:12]}…"
    return outcome.reason  # the same bytes, that another version of a library does not decode
