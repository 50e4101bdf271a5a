"""The order of samples: a keyed permutation that is computed, never stored.

A Feistel network permutes the smallest domain of 2^(2·half_bits) numbers that holds [0, n); applying it again until
the value falls inside [0, n) makes that a permutation of [0, n). Any position of any epoch is computed directly, in
constant memory, so resuming and splitting over ranks need no replay.

A shuffle in blocks keeps neighbours close together, so that they can be read with one request. Blocks are permuted,
and every `lanes` blocks form a window. The window's positions take one sample of each block in turn, in each block's
own random order. `lanes` is a multiple of the batch size, so a rank reads from the same blocks for the whole window.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cache_store.errors import ConfigError

Int64Array = NDArray[np.int64]
Uint64Array = NDArray[np.uint64]

OPEN_BLOCKS = 128
"""Least number of blocks in a window; neighbouring batches draw their samples from one window."""

ROUNDS = 6
"""Four already give a pseudorandom permutation (Luby and Rackoff); two more cost little and help tiny domains."""


@dataclass(frozen=True)
class Permutation:
    """The order of `count` samples: which one is at each position of an endless sequence of epochs."""

    identity: str
    seed: int
    count: int
    block: int = 1
    """Neighbours in a block, shown within one window; 1: single samples are shuffled."""
    lanes: int = 1
    """Number of blocks in a window."""

    def at(self, positions: Int64Array) -> Int64Array:
        epochs, within = np.divmod(positions, self.count)
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = epoch_key(self.identity, self.seed, int(epoch))
            if self.block == 1:
                indices[here] = permute(within[here], self.count, key)
            else:
                indices[here] = permute_blocks(within[here], self, key)
        return indices

    def window(self, position: int) -> tuple[int, int]:
        epoch, within = divmod(position, self.count)
        size = self.block * self.lanes
        first = within - within % size
        return epoch * self.count + first, epoch * self.count + min(first + size, self.count)

    def views_at(self, positions: Int64Array, views: int) -> Int64Array:
        key = _round_key(hashlib.sha256(f"{self.identity}\n{self.seed}\nviews".encode()).digest(), 0)
        first = (_mix(self.at(positions).astype(np.uint64) ^ key) % np.uint64(views)).astype(np.int64)
        return (first + positions // self.count) % views


def is_in(low: float, value: Any, high: float) -> bool:
    return isinstance(value, Real) and low <= float(value) <= high


def whole(name: str, value: Any, least: int = 0) -> int:
    """Return the number as Python's; ConfigError unless it is a whole one in [least, 2^63)."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) < 2**63:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def whole_positions(positions: ArrayLike) -> Int64Array:
    given = np.asarray(positions)
    if given.ndim != 1 or (given.size and (given.dtype.kind not in "iu" or given.min() < 0)):
        raise ConfigError(f"positions must be whole numbers of at least 0, one a sample, got {positions!r:.80}")
    return given.astype(np.int64)


@dataclass(frozen=True)
class RankShare:
    """The part of each global batch that a rank shows."""

    batch_size: int
    """Size of the global batch."""
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("rank", 0), ("world_size", 1)):
            whole(name, getattr(self, name), least)
        size, rank, ranks = self.batch_size, self.rank, self.world_size
        if size % ranks or rank >= ranks:
            raise ConfigError(f"batch_size {size} must divide among ranks (rank {rank} of {ranks})")

    def of_batch(self, positions: Int64Array) -> Int64Array:
        first, end = (len(positions) * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return positions[first:end]

    def select(self, positions: Int64Array) -> Int64Array:
        samples = self.batch_size // self.world_size
        return np.extract(positions % self.batch_size // samples == self.rank, positions)


class Shares:
    """Deals numbered batches out to parts in given shares: which part has batch k follows from k alone.

    The parts are split off one after the other: of the first k batches that are left, floor(k s + u) are of the next
    part, where s is its share among the parts left and u in [0, 1) a hash of its key. At any time each part has had its
    share to within as many batches as there are parts, and exactly after each multiple of the sum of the weights.
    """

    def __init__(self, weights: Sequence[int], keys: Iterable[str]) -> None:
        self._weights = weights
        self._offsets = [int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) for key in keys]

    def before(self, number: int) -> list[int]:
        counts, left = list[int](), sum(self._weights)
        for weight, offset in zip(self._weights, self._offsets, strict=True):
            counts.append(((number * weight << 32) + offset * left) // (left << 32) if weight else 0)
            number, left = number - counts[-1], left - weight
        return counts

    def place(self, number: int) -> tuple[int, int]:
        for part, (before, after) in enumerate(zip(self.before(number), self.before(number + 1), strict=True)):
            if after > before:
                return part, before
        raise AssertionError("the last part's share is 1")


def epoch_key(identity: str, seed: int, epoch: int) -> bytes:
    return hashlib.sha256(f"{identity}\n{seed}\n{epoch}".encode()).digest()


def lanes_of(batch_size: int) -> int:
    """Return the least multiple of `batch_size` that is at least OPEN_BLOCKS."""
    return batch_size * -(-OPEN_BLOCKS // batch_size)


def permute(positions: Int64Array, count: int, key: bytes, variants: Int64Array | None = None) -> Int64Array:
    """Apply the permutation of [0, count) that `key` chooses, and with `variants` each position's own number."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    round_keys = [_round_key(key, number) for number in range(ROUNDS)]
    tweaks = (
        np.zeros(len(positions), np.uint64) if variants is None else _mix(variants.astype(np.uint64) + np.uint64(1))
    )
    values = _feistel(positions.astype(np.uint64), half_bits, round_keys, tweaks)
    # The domain is at most four times as large as the range, so this ends after a few rounds.
    while (outside := values >= count).any():
        values[outside] = _feistel(values[outside], half_bits, round_keys, tweaks[outside])
    return values.astype(np.int64)


def permute_blocks(positions: Int64Array, order: Permutation, key: bytes) -> Int64Array:
    """Apply the permutation in blocks that `key` chooses; samples that fill no whole block come last."""
    count, block, lanes = order.count, order.block, order.lanes
    blocks = count // block
    indices = np.empty_like(positions)
    whole = positions < blocks * block
    window, within = np.divmod(positions[whole], block * lanes)
    open_blocks = np.minimum(lanes, blocks - window * lanes)
    place, lane = np.divmod(within, open_blocks)
    chosen = permute(window * lanes + lane, blocks, key)
    indices[whole] = chosen * block + permute(place, block, key, variants=chosen)
    left = blocks * block
    indices[~whole] = left + permute(positions[~whole] - left, count - left, key)
    return (indices + int.from_bytes(key[:8], "little") % count) % count  # each epoch has other block borders


def _round_key(key: bytes, number: int) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(key + bytes([number])).digest()[:8], "little"))


def _feistel(values: Uint64Array, half_bits: int, round_keys: list[np.uint64], tweaks: Uint64Array) -> Uint64Array:
    """Permute numbers of 2·half_bits bits, each with its own tweak; a Feistel network is a bijection for any mixer."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key ^ tweaks) & mask)
    return (left << shift) | right


def _mix(values: Uint64Array) -> Uint64Array:
    """Apply the finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
