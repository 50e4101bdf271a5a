"""One pass over a shard file: it is hashed, and its samples are checked, while the bytes are in the processor's cache.

Read into one small buffer rather than mapped: a failing disk is then an OSError that names the file, where a mapping
would end the program with a bus error. Nearly all of the time is the SHA-256's.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from cache_store.checksum import crc32c
from cache_store.codec import BLOSC_HEADER, decode_sample
from cache_store.formats import Location
from cache_store.schema import DTYPES, ArraySpec

GAP_BYTES = 64 * 2**10
"""Of what stands between two samples, read together with the second: one call less for each."""

EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}
"""A value is not finite where all its exponent bits are set (IEEE 754)."""


@dataclass(frozen=True, kw_only=True)
class ShardScan:
    """What a pass over a shard file gave."""

    sha256: str
    problems: tuple[tuple[int, str], ...]
    """Slot within the shard, and what is wrong with its sample."""


def scan_shard(path: Path, array: ArraySpec, locations: Sequence[Location | None]) -> ShardScan:
    """Hash the file and check the sample of every slot that has one; OSError where it cannot be read."""
    size = path.stat().st_size
    problems = dict(misplaced(locations, size, array))
    placed = [(*each, slot) for slot, each in enumerate(locations) if each and slot not in problems]
    check, digest, position = SampleCheck(array), hashlib.sha256(), 0
    with path.open("rb", buffering=0) as stream:
        for offset, length, checksum, slot in sorted(placed):
            if offset < position:
                problems[slot] = f"lies at bytes [{offset}, {offset + length}), where another sample lies too"
                continue
            gap = offset - position
            if gap > GAP_BYTES:
                hash_bytes(stream, digest, gap - GAP_BYTES, check.buffer)
                gap = GAP_BYTES
            piece = check.buffer[GAP_BYTES - gap : GAP_BYTES + length]
            read = read_into(stream, piece)
            digest.update(piece[:read])
            position = offset + length
            if problem := check(read - gap, checksum):
                problems[slot] = problem
        hash_bytes(stream, digest, size - position, check.buffer)
    return ShardScan(sha256=digest.hexdigest(), problems=tuple(sorted(problems.items())))


def read_into(stream: FileIO, piece: memoryview) -> int:
    """Bytes read: fewer than asked at the file's end alone, though one call may give fewer on some file systems."""
    read = 0
    while read < len(piece) and (count := stream.readinto(piece[read:])):
        read += count
    return read


def hash_bytes(stream: FileIO, digest: "hashlib._Hash", count: int, buffer: memoryview) -> None:
    """Hash the next bytes of the file, which belong to no sample."""
    while count and (piece := stream.readinto(buffer[:count])):
        digest.update(buffer[:piece])
        count -= piece


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


class SampleCheck:
    """What is wrong with one encoded sample, which lies in `buffer` from GAP_BYTES on."""

    def __init__(self, array: ArraySpec) -> None:
        self._array = array
        self.buffer = memoryview(bytearray(GAP_BYTES + longest_sample(array)))
        self._payload = self.buffer[GAP_BYTES:]
        # What the codec only copies is looked at where it lies.
        in_place = array.codec == "none"
        decoded = np.frombuffer(self._payload, np.uint8) if in_place else np.empty(array.sample_bytes, np.uint8)
        self._decoded, self._in_place, self._finite = decoded, in_place, FiniteCheck(decoded, array.dtype)

    def __call__(self, length: int, checksum: int) -> str | None:
        payload = self._payload[:length] if length >= 0 else self._payload[:0]
        if (found := crc32c(payload)) != checksum:
            return f"crc32c is {found:08x}, expected {checksum:08x}"
        if not (self._in_place and length == len(self._decoded)):
            try:
                decode_sample(payload, self._array.codec, self._decoded)
            except ValueError as error:
                return str(error)
        if count := self._finite.count_others():
            return f"holds {count} non-finite values"
        return None


class FiniteCheck:
    """Looks for values that are not finite in uint8 [bytes] seen as `dtype`.

    Read as integers, the positive ones are the largest of all signed numbers, and the negative ones the largest of all
    unsigned numbers: two maxima, at memory speed, tell that there is none.
    """

    def __init__(self, values: np.ndarray, dtype: str) -> None:
        size = DTYPES[dtype].itemsize
        self._exponent, self._sign = EXPONENTS[dtype], 1 << (8 * size - 1)
        self._signed, self._unsigned = values.view(f"<i{size}"), values.view(f"<u{size}")

    def count_others(self) -> int:
        largest = np.maximum.reduce
        if largest(self._signed) < self._exponent and largest(self._unsigned) < self._sign + self._exponent:
            return 0
        return int(np.count_nonzero((self._unsigned & self._exponent) == self._exponent))
