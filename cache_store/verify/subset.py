"""A share of a cache's shards that is the same every time: `3/20`, `5%`.

Every shard has a fixed place in [0, 1), and a share is a range of places. The place depends on the shard's number
alone: slices N/M of one M never overlap and together are the whole cache, also while it grows.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from cache_store.errors import ConfigError

PLACES = 2**64
STEP = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: multiples of it, modulo 2^64, lie as evenly in any range of places as can be and
follow no period of the shards (Knuth, The Art of Computer Programming 3, 6.4, Fibonacci hashing)."""


@dataclass(frozen=True, kw_only=True)
class Subset:
    """The shards whose place is in [first, end)."""

    first: Fraction
    end: Fraction
    name: str
    """As a person wrote it."""

    def __contains__(self, shard: int) -> bool:
        return self.first <= Fraction(shard * STEP % PLACES, PLACES) < self.end


def parse_subset(text: str) -> Subset:
    """`N/M`, the N-th of M slices, or `P%`, which is the first 1/(100/P); ConfigError for anything else."""
    if match := re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII):
        number, of = map(int, match.groups())
        if 1 <= number <= of:
            return Subset(first=Fraction(number - 1, of), end=Fraction(number, of), name=text)
    elif match := re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", text, re.ASCII):
        share = Fraction(match[1]) / 100
        if 0 < share <= 1:
            return Subset(first=Fraction(0), end=share, name=text)
    raise ConfigError(f"subset must be a slice N/M with N in 1..M, such as 3/20, or a share such as 5%, got {text!r}")
