"""The canary: each worker checks its device before it commits its first shard.

A few images of the first batch are encoded again, with weights read anew, in float32 on a CPU, by the model's own
library; the device's samples may differ only by the rounding of its dtype. A thread does this while the device goes
on, and the first commit waits for it. 2 photographs of 224 x 224 take 5 s with the full-size VAE, whose weights take
0.5 GB meanwhile. For clips, only the first frames are checked: five for Wan, which give two latent frames.
"""

# Axes: N samples.

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self

import numpy as np
import torch

from cache_store.errors import DeviceError, Interrupted
from cache_store.format.array import ArraySpec, ImageRecipe, SampleAxes
from cache_store.storage.threads import POLL_S, STOP_REQUEST
from precompute.encode.tolerance import LIMITS, Difference, device_class, feature_units
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.hardware import hardware_of
from precompute.encoders.registry import load_reference

SAMPLES, PIXELS = 2, 2 * 256**2
"""Most samples, and most pixels in all, to compare; at least one sample is. A CPU takes seconds for each."""


class Canary:
    """Compares the encoder's first samples with those of its reference; close it."""

    def __init__(self, config: EncoderConfig, image: ImageRecipe | None) -> None:
        self._config = config
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="canary")
        self._loading = [self._pool.submit(load_reference, config, image)]
        """The reference, beside the first batches; it is taken out when it is used, so that its memory is freed."""
        self._compared: Future[Difference] | None = None
        self._is_compiled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def wants_samples(self) -> bool:
        return self._compared is None

    def begin(self, inputs: np.ndarray, encoded: np.ndarray, good: Sequence[int], array: ArraySpec) -> None:
        """Start to compare the samples (float32) of the first `good` inputs of a batch, if there are any."""
        self._is_compiled = array.encoder.path == "folded" and self._config.compiles
        if places := choose_places(good, inputs.shape):
            self._compared = self._pool.submit(self._compare, inputs[places], encoded[places], array)

    def _compare(self, inputs: np.ndarray, encoded: np.ndarray, array: ArraySpec) -> Difference:
        reference = self._loading.pop().result()
        first, latent_frames = reference.prefix(torch.from_numpy(inputs))
        wanted = reference.encode(first).numpy()
        if latent_frames is not None:
            encoded, wanted = encoded[:, :, :latent_frames], wanted[:, :, :latent_frames]
        return difference(encoded, wanted, array)

    def wait(self) -> None:
        while self._compared is not None and not self._compared.done() and not STOP_REQUEST.is_set():
            wait([self._compared], POLL_S)

    def refuse_wrong_device(self, device: torch.device) -> None:
        """Wait for the comparison; DeviceError beyond the dtype's limits, Interrupted once a stop is requested."""
        self.wait()
        if self._compared is None:
            return
        if not self._compared.done():
            raise Interrupted("the device was not yet checked; run the same command again to go on")
        found, kind = self._compared.result(), (self._config.compute_dtype, device_class(str(device)))
        limits = LIMITS[kind]
        if limits.admit(found):
            return
        hardware = ", ".join(" ".join(each) for each in hardware_of(device).items())
        slower = ["encoder.compile: false"] if self._is_compiled else []
        slower += ["encoder.compute_dtype: float32"] if kind[0] != "float32" else []
        raise DeviceError(
            f"encoder.device {device} ({hardware}) does not reproduce the samples of the same weights in float32 on a "
            f"CPU. In units of their root mean square they differ by {found}; {kind[0]} on a {kind[1]} device may "
            f"differ by {limits}. Nothing of this worker was committed; try other versions of torch"
            f"{' and cuDNN' if kind[1] == 'cuda' else ''}, or another device"
            f"{'; slower: ' + ', or '.join(slower) if slower else ''}"
        )


def choose_places(good: Sequence[int], inputs_shape: Sequence[int]) -> list[int]:
    return [*good][: max(1, min(SAMPLES, PIXELS // math.prod(inputs_shape[1:4])))]


def difference(encoded: np.ndarray, reference: np.ndarray, array: SampleAxes) -> Difference:
    """Measure how far samples [N, *shape] are from the reference, where that is finite: a build rejects the others."""
    finite = np.isfinite(reference).all(axis=tuple(range(1, reference.ndim)))
    encoded, reference = encoded[finite], reference[finite]
    if not len(reference):
        return Difference.of(np.zeros(1))
    others = tuple(axis for axis in range(encoded.ndim) if axis != array.feature_place + 1)
    squares = np.mean(reference.astype(np.float64) ** 2, axis=others, keepdims=True)
    return Difference.of(np.abs(encoded.astype(np.float64) - reference) / feature_units(squares))
