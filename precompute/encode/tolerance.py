"""How far two correct encodings of one image may differ, by compute dtype and kind of device.

One machine with one library stack gives equal bits. Others round sums in another order. Rounding errors grow with the
samples, so differences are in units of the samples' root mean square. Trained vision towers have a few features far
larger than the others; each of these is measured by its own root mean square. Two numbers are judged: the root mean
square of the differences, and the difference that 99.9 % of the values do not exceed. The largest difference grows with
the number of values, so it is printed, and judged only if it is ten times the second limit.

docs/benchmarks.md has what was measured of each family: one pair of limits for each dtype and kind of device holds for
all. Two images differ by 1 and more. A convolution off by 1 % shows in float32 alone.
"""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from cache_store.format.array import SampleAxes
from cache_store.format.schema import ArraySummary

DeviceClass = Literal["cpu", "cuda"]

HIGH = 0.999
"""The share of values that lie within the high percentile."""

FAR = 10.0
"""A largest difference of so many times the limit of the high percentile is no rounding error."""


@dataclass(frozen=True)
class Difference:
    """How far two encodings differ, in units of the root mean square: a feature's own, if that is larger than all's."""

    overall: float
    """Root mean square of the differences."""
    high: float
    """The difference that 99.9 % of the values do not exceed."""
    largest: float

    @classmethod
    def of(cls, shares: np.ndarray) -> Self:
        """Sum up the differences of all values; those that are not finite count as infinite."""
        shares = np.where(np.isfinite(shares), shares, np.inf)
        high = np.quantile(shares, HIGH, method="higher")  # no interpolation, which infinity would make NaN
        return cls(float(np.sqrt(np.mean(shares**2))), float(high), float(shares.max()))

    def __str__(self) -> str:
        return f"{self.overall:.2g} in root mean square, {self.high:.2g} at 99.9 %, {self.largest:.2g} at most"


@dataclass(frozen=True)
class Limits:
    """How far two correct encodings may differ, in the units of a `Difference`."""

    overall: float
    high: float

    def admit(self, found: Difference) -> bool:
        return found.overall <= self.overall and found.high <= self.high and found.largest <= FAR * self.high

    def __str__(self) -> str:
        return f"{self.overall:g} in root mean square, {self.high:g} at 99.9 %"


LIMITS: dict[tuple[str, DeviceClass], Limits] = {
    ("float32", "cpu"): Limits(4e-5, 3e-4),
    ("float32", "cuda"): Limits(2e-3, 1e-2),
    ("bfloat16", "cpu"): Limits(0.06, 0.5),
    ("bfloat16", "cuda"): Limits(0.06, 0.5),
}


def device_class(*devices: str) -> DeviceClass:
    return "cuda" if any(device.startswith("cuda") for device in devices) else "cpu"


def feature_squares(summary: ArraySummary) -> np.ndarray:
    mean, std = np.array(summary.mean), np.array(summary.std)
    squares: np.ndarray = mean**2 + std**2
    return squares


def feature_units(squares: np.ndarray) -> np.ndarray:
    units: np.ndarray = np.sqrt(np.maximum(squares, squares.mean()))
    units[units == 0.0] = 1.0
    return units


def sample_units(array: SampleAxes, summary: ArraySummary) -> np.ndarray:
    shape = [1] * len(array.axes)
    shape[array.feature_place] = len(summary.mean)
    return feature_units(feature_squares(summary)).reshape(shape)
