"""One pass over a shard file that checks each sample.

Samples are read into one small buffer, not mapped: a failing disk then raises an OSError that names the file, while a
mapping would kill the program with a bus error.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from typing import NamedTuple

import numpy as np

from cache_store.format.codec import BLOSC_HEADER, crc32c, decode_sample
from cache_store.format.layout import Location
from cache_store.format.schema import ArraySpec
from cache_store.format.sums import RunningSums

EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}
"""Exponent bits by dtype: a value is not finite if all of them are set (IEEE 754)."""


class Placed(NamedTuple):
    """The place of a sample to check; sorts in the order of the file."""

    offset: int
    length: int
    crc32c: int
    slot: int


def scan_shard(
    stream: BufferedReader, array: ArraySpec, locations: Sequence[Location | None], sums: RunningSums | None = None
) -> list[tuple[int, str]]:
    """Check every sample of a shard file: list (slot, problem). OSError if the file is unreadable.

    The values of sound samples are added to `sums`.
    """
    size = stream.seek(0, os.SEEK_END)
    problems = dict(misplaced(locations, size, array))
    placed = sorted(Placed(*each, slot) for slot, each in enumerate(locations) if each and slot not in problems)
    problems.update(overlapping(placed))
    buffer, decoded = memoryview(bytearray(longest_sample(array))), np.empty(array.sample_bytes, np.uint8)
    for offset, length, checksum, slot in placed:
        if slot in problems:
            continue
        stream.seek(offset)
        payload = buffer[: stream.readinto(buffer[:length])]
        if (found := crc32c(payload)) != checksum:
            problems[slot] = f"crc32c is {found:08x}, expected {checksum:08x}"
        elif problem := value_problem(payload, array, decoded):
            problems[slot] = problem
        elif sums is not None:
            sums.add(decoded[None])
    return sorted(problems.items())


def overlapping(placed: Iterable[Placed]) -> Iterator[tuple[int, str]]:
    """Yield slots whose samples begin before an earlier sample ends."""
    end = 0
    for offset, length, _, slot in placed:
        if offset < end:
            yield slot, f"is at bytes [{offset}, {offset + length}), which overlap another sample"
        else:
            end = offset + length


def misplaced(locations: Sequence[Location | None], size: int, array: ArraySpec) -> Iterator[tuple[int, str]]:
    """Yield slots whose place in the samples table is outside the file or too long."""
    longest = longest_sample(array)
    for slot, location in enumerate(locations):
        if location is None:
            continue
        offset, length, _ = location
        if not 0 <= offset < offset + length <= size:
            yield slot, f"is at bytes [{offset}, {offset + length}), but the file has {size}"
        elif length > longest:
            yield slot, f"is {length} bytes long, but a sample has at most {longest}"


def longest_sample(array: ArraySpec) -> int:
    """Return the largest size of an encoded sample: blosc stores incompressible data unchanged after its header."""
    return array.sample_bytes + (0 if array.codec == "none" else BLOSC_HEADER.size)


def value_problem(payload: memoryview, array: ArraySpec, decoded: np.ndarray) -> str | None:
    """Decode a sample into `decoded` and say what is wrong with it, or return None."""
    try:
        decode_sample(payload, array.codec, decoded)
    except ValueError as error:
        return str(error)
    size, exponent = array.numpy_dtype.itemsize, EXPONENTS[array.dtype]
    signed, unsigned = decoded.view(f"<i{size}"), decoded.view(f"<u{size}")
    # As integers, non-finite values exceed all finite values of their sign, so two maxima show that there are none.
    if signed.max() < exponent and unsigned.max() < exponent + (1 << (8 * size - 1)):
        return None
    return f"holds {np.count_nonzero((unsigned & exponent) == exponent)} non-finite values"
