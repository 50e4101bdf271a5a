"""Names by the million, in columns: their text in one piece and 28 bytes of numbers each, where a set of Python's own
strings takes some 150 bytes for each.

A name is found by the 64 bits of its hash, which Python draws anew in each process, and then compared.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

ESCAPES = "surrogatepass"
"""Names of files are bytes, and Python makes surrogates of those that are no text."""


class Names(Collection[str]):
    """Names in the order in which they came, numbered from 0; one may come several times."""

    def __init__(self, names: Iterable[str]) -> None:
        self._text, self._ends, hashes = bytearray(), array("q", [0]), array("q")
        for name in names:
            self._text += name.encode(errors=ESCAPES)
            self._ends.append(len(self._text))
            hashes.append(hash(name))
        unsorted = np.frombuffer(hashes, np.int64)
        self._by_hash = np.argsort(unsorted, kind="stable").astype(np.uint32)
        self._hashes = unsorted[self._by_hash]
        self.firsts = self._firsts()
        """Of each name, the number of the first that is equal."""
        self.times = np.bincount(self.firsts, minlength=len(self)).astype(np.uint32)
        """How often each occurs, at its first number; 0 at the others."""

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> str:
        return self._text[self._ends[number] : self._ends[number + 1]].decode(errors=ESCAPES)

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None

    def find(self, name: str) -> int | None:
        """The first number of a name; None where it is not among them."""
        place = int(self._hashes.searchsorted(wanted := hash(name)))
        while place < len(self) and self._hashes[place] == wanted:
            if self[number := int(self._by_hash[place])] == name:
                return number
            place += 1
        return None

    def in_order(self, is_chosen: NDArray[np.bool_]) -> NDArray[Any]:
        """The numbers of those that are chosen, sorted by name."""
        text = [None, pa.py_buffer(self._ends), pa.py_buffer(self._text)]
        order = pc.sort_indices(pa.Array.from_buffers(pa.large_binary(), len(self), text)).to_numpy()
        chosen: NDArray[Any] = order[is_chosen[order]]
        return chosen

    def _firsts(self) -> NDArray[np.uint32]:
        firsts = np.arange(len(self), dtype=np.uint32)
        places = np.arange(len(self), dtype=np.uint32)
        is_again = np.zeros(len(self), bool)
        is_again[1:] = self._hashes[1:] == self._hashes[:-1]
        again = places[is_again]
        begins = np.maximum.accumulate(np.where(is_again, 0, places))[is_again]
        """Of runs of equal hashes."""
        same_hash: dict[str, int] = {}
        for number, first in zip(self._by_hash[again].data, self._by_hash[begins].data, strict=True):
            name = self[number]
            firsts[number] = first if name == self[first] else same_hash.setdefault(name, number)
        return firsts


class ChosenNames(Collection[str]):
    """Some of the names, each once, in an order of their own."""

    def __init__(self, names: Names, numbers: NDArray[Any]) -> None:
        self._names, self._numbers = names, numbers.astype(np.uint32)
        self._is_chosen = np.zeros(len(names), bool)
        self._is_chosen[numbers] = True

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return map(self._names.__getitem__, self._numbers.data)

    def __getitem__(self, place: int) -> str:
        return self._names[self._numbers[place]]

    def __contains__(self, name: object) -> bool:
        number = self._names.find(name) if isinstance(name, str) else None
        return number is not None and bool(self._is_chosen[number])
