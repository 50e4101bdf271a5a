"""What is drawn at a position of training: latents from posteriors, and at which positions captions are dropped.

Each draw comes from Philox (Salmon et al. 2011), a counter-based generator whose key has the seed and whose counter
begins at the position: it is the same in any batch, on any rank, in any worker, after any resume.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.random import Generator, Philox
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from cache_store.errors import ConfigError
from trainer.data.order import is_in, whole, whole_positions

DROPOUT_KEY = 2**32
"""Second word of the generator's key; that of `sample_posterior` is a tower's number, so the two differ."""

# Axes: N samples, M moments: C means, then C log-variances, H W latent cells.


def sample_posterior(moments_NMHW: Tensor | np.ndarray, seed: int, positions: ArrayLike, tower: int = 0) -> Tensor:
    """Draw a latent for each sample, mean + std · noise: [N, C, H, W] float32, from moments of any dtype on the CPU.

    `positions` holds for each sample how many samples were shown before it. The result is a pure function of the
    moments and (seed, position, tower); `tower` gives the encoders of one image different noise.
    """
    if isinstance(moments_NMHW, np.ndarray):
        moments_NMHW = as_tensor(moments_NMHW)
    if not isinstance(moments_NMHW, Tensor) or moments_NMHW.ndim < 2 or moments_NMHW.shape[1] % 2:
        given = list(getattr(moments_NMHW, "shape", [])) or type(moments_NMHW).__name__
        raise ConfigError(f"moments must be [N, means and as many log-variances, …], got {given}")
    places, key = whole_positions(positions).tolist(), [whole("seed", seed), whole("tower", tower)]
    count, moments, *cells = moments_NMHW.shape
    if len(places) != count:
        raise ConfigError(f"positions must be {count:,} whole numbers, one a sample, got {len(places):,}")
    latents_NCHW = torch.empty(count, moments // 2, *cells)
    for latent_CHW, moments_MHW, position in zip(latents_NCHW.numpy(), moments_NMHW, places, strict=True):
        # One sample at a time: in a batch, the last bits would depend on how it is split into vectors and threads.
        mean_CHW, logvar_CHW = np.split(moments_MHW.float().numpy(), 2)
        philox = Philox(key=key, counter=[0, 0, 0, position])
        Generator(philox).standard_normal(dtype=np.float32, out=latent_CHW)
        latent_CHW *= np.exp(logvar_CHW / 2)
        latent_CHW += mean_CHW
    return latents_NCHW


def refuse_rate(rate: float) -> None:
    if not is_in(0, rate, 1):
        raise ConfigError(f"caption_dropout must be in [0, 1], got {rate!r}")


def caption_dropped(positions: ArrayLike, seed: int, rate: float) -> NDArray[np.bool_]:
    """Return at which positions a caption is dropped, with probability `rate`: [N].

    A pure function of (seed, position). ConfigError unless `rate` is in [0, 1].
    """
    refuse_rate(rate)
    key, places = [whole("seed", seed), DROPOUT_KEY], whole_positions(positions).tolist()
    return np.array([Generator(Philox(key=key, counter=[0, 0, 0, each])).random() for each in places]) < rate


def with_nulls(
    samples: Mapping[str, Tensor], nulls: Mapping[str, Tensor], dropped_N: NDArray[np.bool_]
) -> dict[str, Tensor]:
    """Return samples, by name, [N, …] each, with the null prompt's, […] each, where captions are dropped."""
    made, dropped = dict(samples), torch.from_numpy(dropped_N)
    for name, null in nulls.items():
        made[name] = samples[name].clone()  # a shuffle in blocks may hold the samples for other batches
        made[name][dropped] = null.to(made[name].dtype)
    return made


def as_tensors(samples: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: as_tensor(each) for name, each in samples.items()}


def as_tensor(samples: np.ndarray) -> Tensor:
    """Return a tensor that shares the array's memory; numpy's bfloat16, unknown to torch, is converted by its bits."""
    if samples.dtype.name == "bfloat16":
        return torch.from_numpy(samples.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(samples)
