"""Ids of samples: in messages, and as hashes, of which millions fit in memory where ids would not."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SHOWN_IDS = 5
"""Ids named in a message before it says how many more there are."""

Hashes = NDArray[np.int64]
"""8 bytes a sample. Two ids of ten million have one hash in common once in some 400,000 processes, so whatever hashes
find is looked up by the ids, or compared by a digest, before it counts."""


class SomeIds(NamedTuple):
    """How many samples something is true of, and the first of their ids."""

    total: int
    first: Sequence[str]

    def __str__(self) -> str:
        return abridged(self.first, self.total)


NO_IDS = SomeIds(0, ())


def hashes_of(values: Iterable[object]) -> Hashes:
    """Python's own, which differ from process to process."""
    return np.fromiter(map(hash, values), np.int64)


def abridged(names: Sequence[str], count: int | None = None) -> str:
    """Name the first of `count` things, of which `names` are some or all."""
    count = len(names) if count is None else count
    shown = [name if name.isprintable() else ascii(name) for name in names[:SHOWN_IDS]]  # one line, whatever they hold
    more = f" and {count - SHOWN_IDS} more" if count > SHOWN_IDS else ""
    return ", ".join(shown) + more
