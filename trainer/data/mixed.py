"""Mixtures of streams: each global batch comes from one of several, in given shares.

The stream that gives batch k, and its own number there, are pure functions of (k, weights, seed).
"""

import math
import sys
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from cache_store.errors import ConfigError
from trainer.data.order import Shares, is_in, whole
from trainer.data.passes import BatchStream
from trainer.data.prefetch import WindowReader
from trainer.data.stream import LatentStream


class MixedStream(BatchStream):
    """Batches of several streams, each as its stream gives it, with `stream`, the stream's name, and `cursor`, its own.

    Each stream goes through its own epochs; its `epochs` and position do not matter here. Passes, DataLoader workers,
    `state_dict` and `load_state_dict` are as those of `LatentStream`; no blocks are read ahead.

    Args:
        streams: At least two streams by name, with equal `batch_size`, `rank` and `world_size`.
        weights: The share of batches of each, by name, in any unit: {"photos": 3, "prior": 1}.
        seed: Seed of the order of the streams.
        batches: Number of batches of a pass; None: it never ends.
    """

    def __init__(
        self,
        streams: Mapping[str, LatentStream],
        weights: Mapping[str, float],
        *,
        seed: int = 0,
        batches: int | None = None,
    ) -> None:
        if len(streams) < 2 or streams.keys() != weights.keys():
            given = f"{', '.join(map(str, streams)) or 'none'}, and weights of {', '.join(map(str, weights)) or 'none'}"
            raise ConfigError(f"a mixture needs two streams or more and the weight of each; got streams {given}")
        for name, weight in weights.items():
            if not is_in(0, weight, sys.float_info.max) or weight == 0:
                raise ConfigError(f"weights: that of {name} must be above 0 and finite, got {weight!r}")
        (first, share), *others = ((name, each.share) for name, each in streams.items())
        for name, other in others:
            if other != share:
                one, two = (f"{each.batch_size}, {each.rank} of {each.world_size}" for each in (share, other))
                raise ConfigError(
                    f"streams: batch_size and rank are {one} of {first}, {two} of {name}; make them equal"
                )
        super().__init__(share, None if batches is None else whole("batches", batches, 1) * share.batch_size)
        self.streams, self.seed = dict(streams), whole("seed", seed)
        self._weights = {name: Fraction(str(weights[name])) for name in streams}
        unit = math.lcm(*(weight.denominator for weight in self._weights.values()))
        keys, self._names = (f"{self.seed}\n{name}" for name in streams), list(streams)
        self._shares = Shares([int(weight * unit) for weight in self._weights.values()], keys)

    def place(self, number: int) -> tuple[str, int]:
        """Return the stream of global batch `number`, and the batch's number in it."""
        part, own = self._shares.place(number)
        return self._names[part], own

    def batch(self, number: int, ahead: WindowReader | None = None) -> dict[str, Any]:
        name, own = self.place(number)
        return {**self.streams[name].batch(own), "stream": name, "cursor": (number + 1) * self.batch_size}

    def must_match(self) -> dict[str, Any]:
        shares = ", ".join(f"{name} {share}" for name, share in self._weights.items())
        fields: dict[str, Any] = {"mixture": shares, "seed": self.seed}
        for name, each in self.streams.items():
            fields |= {f"{name}.{key}": value for key, value in each.must_match().items()}
        return fields
