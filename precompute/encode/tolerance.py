"""How far two correct encodings of one image may differ, by compute dtype and kind of device.

One machine with one library stack gives equal bits. Others round sums in another order. Rounding errors grow with the
latents, so differences are divided by the root mean square of the cache's latents.

Measured with the full-size Wan encoder at 224 x 224 (random weights, gains and biases as far from their initial values
as trained ones; torch 2.13, a CPU with AVX512-BF16), four photographs, the largest difference over all values:

    float32   oneDNN against torch's own kernels 6.7e-6, folded against native 6.5e-6, AVX2 against AVX512 4.5e-6,
              native in batches of 1 against 4 2.4e-6; 1, 2 and 8 threads, and folded batches of 1 and 4: equal bits
    TF32      10-bit mantissas in every convolution, torch's default for float32 on GPUs: 1.9e-3 (emulated)
    bfloat16  folded against native 0.035, AVX512 against AVX512-BF16 0.030, AVX2 0.025; against float32 0.033

The table allows about five times that; no GPU was measured. The latents of two images differ by 1 and more.

The vision tower of SigLIP base at 224 x 224 (initial weights, on noise) differed between bfloat16 and float32 by 0.064,
and in batches of 1 and 10 not at all. Trained towers have a few features far larger than the others, with rounding
errors larger in proportion: with three gains of 30 the tower differed by 0.46, and by 0.041 with each feature measured
by its own size. So if a feature's root mean square exceeds that of all values, its differences are divided by the
ratio.

Text encoders are deep, and their last hidden states differed more between bfloat16 and float32 (initial weights, random
norms, width 256, 2 texts of 128 tokens): T5 with 24 layers by 0.12, Qwen 3 with 36 by 0.11, Gemma 2 with 26 by 0.11; in
root mean square by 0.023, 0.014 and 0.016. Full-size encoders have a hundred times as many values to be the largest.
"""

from typing import Literal

import numpy as np

from cache_store.format.array import SampleLayout
from cache_store.format.schema import ArraySummary

DeviceClass = Literal["cpu", "cuda"]

RELATIVE_TOLERANCE: dict[tuple[str, DeviceClass], float] = {
    ("float32", "cpu"): 3e-5,
    ("float32", "cuda"): 1e-2,
    ("bfloat16", "cpu"): 0.15,
    ("bfloat16", "cuda"): 0.15,
}
"""Largest difference allowed, as a share of the root mean square."""

OVERALL_TOLERANCE: dict[tuple[str, DeviceClass], float] = {
    ("float32", "cpu"): 1e-5,
    ("float32", "cuda"): 2e-3,
    ("bfloat16", "cpu"): 0.03,
    ("bfloat16", "cuda"): 0.03,
}
"""Root mean square of the differences allowed, as such a share. It tells more than the largest difference: with a Wan
encoder of a third of the width (two photographs of 96 x 96, random weights) it was 1.3e-6 between folded and native in
float32, and 0.008 to 0.011 between either in bfloat16 and native in float32. A convolution off by 1 % changed a latent
by less than bfloat16 does, wherever in the network it was; in float32 it shows.
"""


TEXT_FACTOR = 3.0
"""Factor of the tolerances for text encoders in bfloat16."""


def tolerances(compute_dtype: str, device: DeviceClass, made_of: Literal["image", "text"]) -> tuple[float, float]:
    """Return the allowed root mean square of the differences, and the allowed largest difference."""
    kind, factor = (compute_dtype, device), 1.0
    if (compute_dtype, made_of) == ("bfloat16", "text"):
        factor = TEXT_FACTOR
    return factor * OVERALL_TOLERANCE[kind], factor * RELATIVE_TOLERANCE[kind]


def device_class(*devices: str) -> DeviceClass:
    """Return the looser class of the devices: `cuda` if any of them is a GPU."""
    return "cuda" if any(device.startswith("cuda") for device in devices) else "cpu"


def root_mean_square(summary: ArraySummary) -> float:
    """Compute the root mean square of all stored values."""
    mean, std = np.array(summary.mean), np.array(summary.std)
    return float(np.sqrt(np.mean(mean**2 + std**2)))


def feature_scale(layout: SampleLayout, summary: ArraySummary) -> np.ndarray:
    """Divide each feature's root mean square by that of all values, at least 1; the result broadcasts over a sample."""
    size = np.hypot(summary.mean, summary.std)
    shape = [1] * len(layout.shape)
    shape[layout.feature_place] = layout.num_features
    return np.maximum(size / (root_mean_square(summary) or 1.0), 1.0).reshape(shape)
