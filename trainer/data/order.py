"""The order of samples: a keyed permutation that is computed, never stored.

A Feistel network permutes the smallest domain of 2^(2·half_bits) numbers that holds [0, n); walking its cycle until
the value falls inside [0, n) again makes that a permutation of [0, n). Any position of any epoch is known at once,
in constant memory, so resuming and splitting over ranks need no replay.

A shuffle in blocks keeps neighbours together for a while, so that they can be read as one. Blocks are permuted, and so
many as there are lanes are a window; its positions take one sample of each block in turn, in an order of each block's
own. Lanes are a multiple of the batch, so a rank's part of it meets the same blocks as long as a window lasts.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Uint64Array = NDArray[np.uint64]

OPEN_BLOCKS = 128
"""Least blocks of a window, of which the samples of neighbouring batches are."""

ROUNDS = 6
"""Four already give a pseudorandom permutation (Luby and Rackoff); two more cost little and help tiny domains."""


@dataclass(frozen=True)
class SampleOrder:
    """Which of `count` samples stands at each position of the endless concatenation of epochs."""

    identity: str
    seed: int
    count: int
    block: int = 1
    """Neighbours that are shown within one window; 1: a sample may come from anywhere."""
    lanes: int = 1
    """Blocks of a window."""

    def at(self, positions: Int64Array) -> Int64Array:
        """Return the indices in [0, count) at `positions`, which count samples consumed since the start."""
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
        """Return the first position, and the one behind the last, that show samples of the same blocks."""
        epoch, within = divmod(position, self.count)
        size = self.block * self.lanes
        first = within - within % size
        return epoch * self.count + first, epoch * self.count + min(first + size, self.count)

    def views_at(self, positions: Int64Array, views: int) -> Int64Array:
        """Return the view, in [0, views), that the sample at each position shows.

        A sample takes its views in turn, from epoch to epoch; which it begins with depends on (identity, seed).
        """
        key = _round_key(hashlib.sha256(f"{self.identity}\n{self.seed}\nviews".encode()).digest(), 0)
        begins_with = (_mix(self.at(positions).astype(np.uint64) ^ key) % np.uint64(views)).astype(np.int64)
        return (begins_with + positions // self.count) % views


@dataclass(frozen=True)
class GroupedOrder(SampleOrder):
    """Samples of a length in one batch: within a window of some batches they are sorted, and its batches shuffled.

    As pure a function of the position: a window is known from its number alone.
    """

    lengths: NDArray[np.int64] = field(kw_only=True)
    """One entry for each of the `count` samples."""
    batch_size: int = field(kw_only=True)
    batches: int = field(kw_only=True)
    """Batches of a window."""

    def at(self, positions: Int64Array) -> Int64Array:
        size = self.batch_size * self.batches
        indices = np.empty_like(positions)
        for window in np.unique(positions // size).tolist():
            here = positions // size == window
            indices[here] = self._window(window)[positions[here] - window * size]
        return indices

    def _window(self, window: int) -> Int64Array:
        size = self.batch_size * self.batches
        drawn = super().at(np.arange(window * size, (window + 1) * size))
        by_length = drawn[np.argsort(self.lengths[drawn], kind="stable")].reshape(self.batches, self.batch_size)
        key = hashlib.sha256(f"{self.identity}\n{self.seed}\nwindow {window}".encode()).digest()
        shuffled: Int64Array = by_length[permute(np.arange(self.batches), self.batches, key)].reshape(-1)
        return shuffled


def epoch_key(identity: str, seed: int, epoch: int) -> bytes:
    return hashlib.sha256(f"{identity}\n{seed}\n{epoch}".encode()).digest()


def lanes_of(batch_size: int) -> int:
    """Return how many blocks a window has, of batches of that size."""
    return batch_size * -(-OPEN_BLOCKS // batch_size)


def permute(positions: Int64Array, count: int, key: bytes, of: Int64Array | None = None) -> Int64Array:
    """Apply the permutation of [0, count) that `key` chooses to each position; `of`: one for each of these numbers."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    round_keys = [_round_key(key, number) for number in range(ROUNDS)]
    tweaks = np.zeros(len(positions), np.uint64) if of is None else _mix(of.astype(np.uint64) + np.uint64(1))
    values = _feistel(positions.astype(np.uint64), half_bits, round_keys, tweaks)
    # The domain is at most four times as large as the range, so a walk takes a few steps.
    while (outside := values >= count).any():
        values[outside] = _feistel(values[outside], half_bits, round_keys, tweaks[outside])
    return values.astype(np.int64)


def permute_blocks(positions: Int64Array, order: SampleOrder, key: bytes) -> Int64Array:
    """Apply the permutation in blocks that `key` chooses; what is left of whole blocks comes last.

    Numbers are counted on from one of each epoch's own, so blocks begin elsewhere and others are left each time.
    """
    count, block, lanes = order.count, order.block, order.lanes
    blocks = count // block
    indices = np.empty_like(positions)
    whole = positions < blocks * block
    window, within = np.divmod(positions[whole], block * lanes)
    open_blocks = np.minimum(lanes, blocks - window * lanes)
    place, lane = np.divmod(within, open_blocks)
    chosen = permute(window * lanes + lane, blocks, key)
    indices[whole] = chosen * block + permute(place, block, key, of=chosen)
    left = blocks * block
    indices[~whole] = left + permute(positions[~whole] - left, count - left, key)
    return (indices + int.from_bytes(key[:8], "little") % count) % count


def _round_key(key: bytes, number: int) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(key + bytes([number])).digest()[:8], "little"))


def _feistel(values: Uint64Array, half_bits: int, round_keys: list[np.uint64], tweaks: Uint64Array) -> Uint64Array:
    """Permute numbers of 2·half_bits bits, by each one's tweak: a bijection whatever the mixer."""
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
