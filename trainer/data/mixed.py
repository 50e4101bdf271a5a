"""Mixtures of streams: each global batch comes from one of several, in given shares.

Which stream gives batch k is a pure function of (k, weights, seed). The streams are split off one after the other: of
the first k batches that are left, floor(k s + u) are of the next stream, where s is its share among the streams left
and u in [0, 1) a hash of the seed. So the batch's own number in its stream follows without counting, and at any time
each stream has had its share, to within as many batches as there are streams.
"""

import hashlib
import sys
from collections.abc import Mapping
from fractions import Fraction
from math import floor
from typing import Any

from cache_store.errors import ConfigError
from trainer.data.order import RankShare, is_in, whole
from trainer.data.passes import BatchStream
from trainer.data.prefetch import WindowReader
from trainer.data.stream import LatentStream


class MixedStream(BatchStream):
    """Batches of several streams, each as its stream gives it, with `stream`, the stream's name, and `cursor`, its own.

    Each stream goes through its own epochs; its `epochs` and position do not matter here. Passes, DataLoader workers,
    `state_dict` and `load_state_dict` are as those of `LatentStream`. Streams are read without reading blocks ahead.

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
        if not all(isinstance(each, Mapping) for each in (streams, weights)):
            given = f"{type(streams).__name__} and {type(weights).__name__}"
            raise ConfigError(f"streams and weights must be mappings of the same names, got {given}")
        if len(streams) < 2 or streams.keys() != weights.keys():
            given = f"{', '.join(map(str, streams)) or 'none'}, and weights of {', '.join(map(str, weights)) or 'none'}"
            raise ConfigError(f"a mixture needs two streams or more and the weight of each; got streams {given}")
        if faulty := [name for name, each in streams.items() if not isinstance(each, BatchStream)]:
            raise ConfigError(f"streams: {faulty[0]} must be a LatentStream, got {type(streams[faulty[0]]).__name__}")
        for name, weight in weights.items():
            if not is_in(0, weight, sys.float_info.max) or weight == 0:
                raise ConfigError(f"weights: that of {name} must be above 0 and finite, got {weight!r}")
        share = same_share(streams)
        super().__init__(share, None if batches is None else whole("batches", batches, 1) * share.batch_size)
        self.streams, self.seed = dict(streams), whole("seed", seed)
        self._shares = {name: Fraction(str(weights[name])) for name in streams}

    def place(self, number: int) -> tuple[str, int]:
        """Return the stream of global batch `number`, and the batch's number in it."""
        left = sum(self._shares.values(), Fraction())
        for name, share in self._shares.items():
            offset = Fraction(int(hashlib.sha256(f"{self.seed}\n{name}".encode()).hexdigest()[:8], 16), 2**32)
            before, after = (floor(each * share / left + offset) for each in (number, number + 1))
            if after > before:
                return name, before
            number, left = number - before, left - share
        raise AssertionError("the last stream's share is 1")

    def batch(self, number: int, ahead: WindowReader | None = None) -> dict[str, Any]:
        name, own = self.place(number)
        return {**self.streams[name].batch(own), "stream": name, "cursor": (number + 1) * self.batch_size}

    def must_match(self) -> dict[str, Any]:
        shares = ", ".join(f"{name} {share}" for name, share in self._shares.items())
        fields: dict[str, Any] = {"mixture": shares, "seed": self.seed}
        for name, each in self.streams.items():
            fields |= {f"{name}.{key}": value for key, value in each.must_match().items()}
        return fields


def same_share(streams: Mapping[str, LatentStream]) -> RankShare:
    """Return the streams' common part of a batch; ConfigError if they differ."""
    (first, share), *others = ((name, each.share) for name, each in streams.items())
    for name, other in others:
        if other != share:
            one, two = (f"{each.batch_size}, {each.rank} of {each.world_size}" for each in (share, other))
            raise ConfigError(f"streams: batch_size and rank of {first} are {one}, of {name} {two}; they must be equal")
    return share
