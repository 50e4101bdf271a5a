"""One pass over a shard file that checks each sample.

Read into one small buffer rather than mapped: a failing disk is then an OSError that names the file, where a mapping
would end the program with a bus error.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from typing import NamedTuple

import numpy as np

from cache_store.format.codec import BLOSC_HEADER, crc32c, decode_sample
from cache_store.format.layout import Location
from cache_store.format.schema import DTYPES, ArraySpec
from cache_store.format.statistics import FeatureSums

PIECE_BYTES = 512 * 2**10
"""Read at once at most, unless a sample is larger: small enough for the second-level cache, and twenty
samples of 25 KB share what each call costs.
"""

EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}
"""A value is not finite where all its exponent bits are set (IEEE 754)."""


class Placed(NamedTuple):
    """A sample to check, in the order of the file."""

    offset: int
    length: int
    crc32c: int
    slot: int


def scan_shard(
    stream: BufferedReader, array: ArraySpec, locations: Sequence[Location | None], sums: FeatureSums | None = None
) -> list[tuple[int, str]]:
    """Check the sample of every slot that has one: (slot, what is wrong with it). OSError if the file is unreadable.

    The values of samples with which nothing is wrong are added to `sums`.
    """
    size = stream.seek(0, os.SEEK_END)
    problems = dict(misplaced(locations, size, array))
    placed = sorted(Placed(*each, slot) for slot, each in enumerate(locations) if each and slot not in problems)
    problems.update(overlapping(placed))
    check = PieceCheck(array, sums)
    for piece in pieces(each for each in placed if each.slot not in problems):
        start, end = piece[0].offset, piece[-1].offset + piece[-1].length
        stream.seek(start)
        problems.update(check(piece, stream.readinto(check.buffer[: end - start])))
    return sorted(problems.items())


def overlapping(placed: Iterable[Placed]) -> Iterator[tuple[int, str]]:
    """Slots whose samples begin before an earlier one ends."""
    end = 0
    for offset, length, _, slot in placed:
        if offset < end:
            yield slot, f"lies at bytes [{offset}, {offset + length}), where another sample lies too"
        else:
            end = offset + length


def pieces(placed: Iterable[Placed]) -> Iterator[list[Placed]]:
    """Neighbours, as many as are read at once."""
    piece: list[Placed] = []
    for each in placed:
        if piece and each.offset + each.length - piece[0].offset > PIECE_BYTES:
            yield piece
            piece = []
        piece.append(each)
    if piece:
        yield piece


def misplaced(locations: Sequence[Location | None], size: int, array: ArraySpec) -> Iterator[tuple[int, str]]:
    """Slots whose samples cannot be where the samples table says."""
    longest = longest_sample(array)
    for slot, location in enumerate(locations):
        if location is None:
            continue
        offset, length, _ = location
        if not 0 <= offset < offset + length <= size:
            yield slot, f"lies at bytes [{offset}, {offset + length}), the file has {size}"
        elif length > longest:
            yield slot, f"is {length} bytes long, a sample takes {longest} at most"


def longest_sample(array: ArraySpec) -> int:
    """Bytes of an encoded sample at most: blosc keeps as it is what does not compress, behind its header."""
    return array.sample_bytes + (0 if array.codec == "none" else BLOSC_HEADER.size)


class PieceCheck:
    """What is wrong with the encoded samples of a piece of the file, which lies in `buffer`."""

    def __init__(self, array: ArraySpec, sums: FeatureSums | None) -> None:
        self._array, self._sums = array, sums
        self.buffer = memoryview(bytearray(max(PIECE_BYTES, longest_sample(array))))
        self._decoded = np.empty(array.sample_bytes, np.uint8)
        self._decoded_values = FiniteCheck(self._decoded, array.dtype)
        # What the codec only copies is looked at where it lies.
        self._values_in_place = FiniteCheck(self.buffer, array.dtype) if array.codec == "none" else None

    def __call__(self, piece: Sequence[Placed], read: int) -> Iterator[tuple[int, str]]:
        start, held, sound = piece[0].offset, self.buffer[:read], self._all_sound(piece)
        for offset, length, checksum, slot in piece:
            payload = held[offset - start : offset - start + length]
            if (found := crc32c(payload)) != checksum:
                yield slot, f"crc32c is {found:08x}, expected {checksum:08x}"
            elif not sound and (problem := self._value_problem(payload)):
                yield slot, problem
            elif self._sums is not None:
                values = np.frombuffer(payload if sound else self._decoded, self._array.numpy_dtype)
                self._sums.add(values.reshape(self._array.shape))

    def _all_sound(self, piece: Sequence[Placed]) -> bool:
        """Whether a look at all samples at once tells that each is as long as it must be, and finite."""
        if self._values_in_place is None or any(each.length != self._array.sample_bytes for each in piece):
            return False
        start = piece[0].offset
        return self._values_in_place.all_finite([each.offset - start for each in piece], self._array.sample_bytes)

    def _value_problem(self, payload: memoryview) -> str | None:
        try:
            decode_sample(payload, self._array.codec, self._decoded)
        except ValueError as error:
            return str(error)
        count = self._decoded_values.count_others()
        return f"holds {count} non-finite values" if count else None


class FiniteCheck:
    """Looks for values that are not finite in [bytes] seen as `dtype`.

    Read as integers, the positive ones are the largest of all signed numbers, and the negative ones the largest of all
    unsigned numbers: two maxima, at memory speed, tell that there is none.
    """

    def __init__(self, values: np.ndarray | memoryview, dtype: str) -> None:
        size = DTYPES[dtype].itemsize
        self._size, self._exponent, self._sign = size, EXPONENTS[dtype], 1 << (8 * size - 1)
        self._signed, self._unsigned = (np.frombuffer(values, f"<{kind}{size}", len(values) // size) for kind in "iu")

    def all_finite(self, starts: Sequence[int], length: int) -> bool:
        """Whether all values in [start, start + length) are, for each start in bytes, rising; False if not aligned."""
        if any(start % self._size for start in starts):
            return False
        # Every second maximum is over what lies between two samples.
        bounds = [bound // self._size for start in starts for bound in (start, start + length)]
        end = bounds.pop()
        signed, unsigned = (np.maximum.reduceat(values[:end], bounds)[::2] for values in (self._signed, self._unsigned))
        return bool(signed.max() < self._exponent and unsigned.max() < self._sign + self._exponent)

    def count_others(self) -> int:
        largest = np.maximum.reduce
        if largest(self._signed) < self._exponent and largest(self._unsigned) < self._sign + self._exponent:
            return 0
        return int(np.count_nonzero((self._unsigned & self._exponent) == self._exponent))
