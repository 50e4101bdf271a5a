"""Latents as codes of 8 bits: value = low + step * code, with a low and a step for each sample and channel.

They are the channel's minimum and its range over 255: nothing is clipped, and no pass over the data comes first. Each
operation is one of float32 (IEEE 754), so that all machines give the same bits.
"""

# Axes: N samples, C channels.

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache_store.format.array import DTYPES, StoreDtype

LARGEST_CODE = np.float32(255)


class Scale(NamedTuple):
    """The map from codes to values, float32 [N, C] each, in columns of the samples table."""

    uint8_low: NDArray[np.float32]
    """Value of code 0."""
    uint8_step: NDArray[np.float32]
    """Difference between the values of neighbouring codes; 0 if all values of the channel are equal."""


def quantize(samples: NDArray[np.float32]) -> tuple[NDArray[np.uint8], Scale]:
    """Return the codes of samples [N, C, ...] and their scale; what is not finite or overflows gives such values."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        values_NCV = samples.reshape(*samples.shape[:2], -1)
        low_NC = values_NCV.min(axis=2)
        scale = Scale(low_NC, (values_NCV.max(axis=2) - low_NC) / LARGEST_CODE)
        low, step = (along_channels(each, samples.ndim) for each in scale)
        places = np.rint((samples - low) / np.where(step == 0, np.float32(1), step))
        return np.clip(np.nan_to_num(places), 0, LARGEST_CODE).astype(np.uint8), scale


def dequantize(codes: NDArray[np.uint8], scale: Scale, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Return the values of codes [N, C, ...], float32, in `out` if it is given."""
    low, step = (along_channels(each, codes.ndim) for each in scale)
    with np.errstate(invalid="ignore"):
        values = np.multiply(codes, step, out=out, dtype=np.float32)
        values += low
    return values


def as_read(samples: NDArray[np.float32], dtype: StoreDtype) -> NDArray[Any]:
    """Return float32 samples [N, *shape] as a cache of this dtype gives them."""
    if dtype == "uint8":
        return dequantize(*quantize(samples))
    with np.errstate(over="ignore"):  # what overflows is infinite
        return samples.astype(DTYPES[dtype])


def steps(samples: NDArray[Any], dtype: StoreDtype) -> NDArray[Any]:
    """Return how far apart neighbouring values are that this dtype can store, at each of samples [N, *shape]."""
    if dtype == "uint8":
        return along_channels(quantize(samples)[1].uint8_step, samples.ndim)
    spacings: NDArray[Any] = np.spacing(np.abs(samples))
    return spacings


def along_channels(each_NC: NDArray[np.float32], ndim: int) -> NDArray[np.float32]:
    return each_NC.reshape(*each_NC.shape, *[1] * (ndim - 2))
