"""Caption dropout: at some positions of training, the null prompt takes the place of a sample's text.

Which positions is a pure function of (seed, position): the same on any ranks, in any worker, after any resume.
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

# Axes: N samples of a batch.


def refuse_rate(rate: float) -> None:
    if not is_in(0, rate, 1):
        raise ConfigError(f"caption_dropout must be in [0, 1], got {rate!r}")


def caption_dropped(positions: ArrayLike, seed: int, rate: float) -> NDArray[np.bool_]:
    """Return at which positions a caption is dropped, with probability `rate`: [N].

    Like the noise of `sample_posterior`, it comes from a generator whose key is the seed and whose counter begins at
    the position. ConfigError unless `rate` is in [0, 1].
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
