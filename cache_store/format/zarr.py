"""The Zarr v3 form: one `sharding_indexed` shard file per unit of work, one sample per inner chunk.

The bytes are written by hand: a shard is simple (chunks in order, then an index), and zarr's own writer takes
milliseconds per chunk of this size. Layout of a shard file, from the sharding codec's specification
(zarr-specs, v3, codecs/sharding-indexed):

    sample bytes, crc32c (4 bytes, little-endian)      for every cached row, in row order
    offset, length (two little-endian uint64)          for every row of a full shard; 2^64-1 twice where absent
    crc32c of the index (4 bytes, little-endian)
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.format.array import ROW_AXIS, CodecName, StoreDtype
from cache_store.format.codec import crc32c, zarr_codecs
from cache_store.format.layout import SPEC_ATTRIBUTE, SPEC_FILE, ZARR_ARRAY
from cache_store.format.record import canonical_json
from cache_store.format.schema import Spec
from cache_store.format.shards import NOWHERE, EncodedRows, Location, ShardSamples

ABSENT = np.uint64(2**64 - 1)
CRC = struct.Struct("<I")


class ZarrShardWriter:
    """Writes one shard; `capacity` is samples_per_shard, also for a short last shard."""

    def __init__(self, stream: BinaryIO, capacity: int) -> None:
        self._stream = stream
        self._index = np.full((capacity, 2), ABSENT, "<u8")
        self._next = 0
        self._position = 0

    def append(self, rows: EncodedRows) -> NDArray[np.int64]:
        """Add the next rows; return their places [N, 3]: offset, length and crc32c, or -1 for an absent row."""
        count, marks = len(rows.payloads), rows.checksums.astype("<u4").view(f"V{CRC.size}").tolist()
        self._stream.write(b"".join(chain.from_iterable(zip(rows.payloads, marks, strict=True))))
        sizes = np.fromiter(map(len, rows.payloads), np.int64, count) + CRC.size
        ends = self._position + np.cumsum(sizes)
        places = np.full((len(rows.kept), 3), NOWHERE, np.int64)
        places[rows.kept] = np.stack([ends - sizes, sizes - CRC.size, rows.checksums], axis=1)
        slots = self._next + np.flatnonzero(rows.kept)
        self._index[slots] = np.stack([ends - sizes, sizes], axis=1)
        self._next += len(rows.kept)
        self._position += int(sizes.sum())
        return places

    def finish(self) -> None:
        index = self._index.tobytes()
        self._stream.write(index)
        self._stream.write(CRC.pack(crc32c(index)))


class ZarrFormat:
    """Names and metadata of the Zarr form."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    @staticmethod
    def unsupported(dtype: StoreDtype, codec: CodecName) -> str | None:
        return None

    def shard_file(self, shard: int) -> str:
        array, chunk = self._spec.names[self._spec.array_indices[shard]], self._spec.places_in_arrays[shard]
        return f"{ZARR_ARRAY}/{array}/c/{chunk}{'/0' * len(self._spec.array.axes)}"

    def writer(self, stream: BinaryIO, shard: int, planned: pa.Table) -> ZarrShardWriter:
        return ZarrShardWriter(stream, self._spec.samples_per_shard)

    def metadata(self) -> dict[str, bytes]:
        """Return every metadata file; the group has that of all arrays, so that readers list no folder."""
        spec = self._spec
        nodes: dict[str, object] = {ZARR_ARRAY: {"zarr_format": 3, "node_type": "group", "attributes": {}}}
        nodes |= {f"{ZARR_ARRAY}/{name}": array_metadata(spec, array) for array, name in enumerate(spec.names)}
        group = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {SPEC_ATTRIBUTE: spec},
            "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": nodes},
        }
        files = {f"{name}/zarr.json": canonical_json(node) for name, node in nodes.items()}
        return {SPEC_FILE: canonical_json(group), **files}

    @staticmethod
    def places_in(index: memoryview) -> NDArray[np.int64]:
        """Return offset and length of each sample, [cached, 2], in row order, from a shard's index."""
        entries = np.frombuffer(index[: -CRC.size], np.dtype("<i8")).reshape(-1, 2)  # so that ABSENT is negative
        places: NDArray[np.int64] = entries[entries[:, 0] >= 0] - np.array((0, CRC.size))
        return places

    @property
    def index_bytes(self) -> int:
        """Bytes of a shard's index, at the end of its file, with its checksum."""
        return self._spec.samples_per_shard * 16 + CRC.size

    def proof(self, data: memoryview, locations: Sequence[Location | None]) -> int:
        first = next(filter(None, locations), Location(0, 0, 0))
        return self.proof_of(data[-self.index_bytes :], data[first.offset : first.offset + first.length])

    @staticmethod
    def proof_of(index: memoryview, sample: memoryview | bytes) -> int:
        """Return the crc32c over an index, then a sample; with the index's own checksum, every index would give one."""
        return int(crc32c(bytes(index[: -CRC.size]) + bytes(sample)))

    def structure_problems(self, data: memoryview, samples: ShardSamples) -> Iterator[tuple[int | None, str]]:
        """Compare every byte outside the latents with what the samples table implies: (slot or None, difference)."""
        capacity, size = self._spec.samples_per_shard, self.index_bytes
        if len(data) < size:
            yield None, f"shard is {len(data)} bytes, too short for its index of {size}"
            return
        raw = data[-size : -CRC.size]
        is_index_sound = CRC.unpack(data[-CRC.size :])[0] == crc32c(raw)
        if not is_index_sound:
            yield None, "shard index does not match its crc32c"
        places = np.full((capacity, 3), NOWHERE)
        places[: len(samples.locations)] = place_arrays(samples.locations)
        expected_bytes = int((places[places[:, 1] >= 0, 1] + CRC.size).sum()) + size
        if len(data) != expected_bytes:
            yield None, f"is {len(data)} bytes, expected {expected_bytes} for samples and index"
        if is_index_sound or len(data) == expected_bytes:  # otherwise the last bytes are not the index
            yield from index_problems(np.frombuffer(raw, "<u8").reshape(-1, 2), places)
        yield from position_problems(data[:-size], places)


def place_arrays(locations: list[Location | None]) -> np.ndarray:
    """Return [rows, 3] int64: offset, length and crc32c, or -1 three times for an absent row."""
    return np.array([location or NOWHERE for location in locations], np.int64).reshape(-1, 3)


def index_problems(index: np.ndarray, places: np.ndarray) -> Iterator[tuple[int, str]]:
    """Yield the entries of a shard's index, uint64 [rows, 2], that differ from the samples table."""
    expected = np.full(index.shape, ABSENT, "<u8")
    present = np.flatnonzero(places[:, 1] >= 0)
    expected[present] = (places[present, :2] + (0, CRC.size)).view("<u8")
    for slot in np.flatnonzero((index != expected).any(axis=1)).tolist():
        found, asked = index[slot].tolist(), expected[slot].tolist()
        yield slot, f"shard index says {found}, samples table says {asked}"


def position_problems(samples: memoryview, places: np.ndarray) -> Iterator[tuple[int, str]]:
    """Yield samples that do not follow the previous one directly, or whose stored crc32c differs."""
    slots = np.flatnonzero(places[:, 1] >= 0)
    offsets, lengths, checksums = places[slots].T
    ends = np.cumsum(lengths + CRC.size)
    starts = ends - lengths - CRC.size
    for each in np.flatnonzero(offsets != starts).tolist():
        yield int(slots[each]), f"is at byte {offsets[each]}, expected {starts[each]}"
    behind = offsets + lengths
    within = np.flatnonzero((behind >= 0) & (behind <= len(samples) - CRC.size))
    stored = np.frombuffer(samples, np.uint8)[behind[within, None] + np.arange(CRC.size)].view("<u4")[:, 0]
    for each in within[stored != checksums[within]].tolist():
        yield int(slots[each]), "crc32c behind the sample differs from the samples table"


def array_metadata(spec: Spec, index: int) -> dict[str, object]:
    """Describe an array: a chunk of `samples_per_shard` rows for each of its shards, even a shorter one."""
    array, shards = spec.sized_arrays[index], np.flatnonzero(spec.array_indices == index)
    chunk = spec.samples_per_shard
    rows = (len(shards) - 1) * chunk + len(spec.shard_rows(int(shards[-1]))) if len(shards) else 0
    sharding = {
        "chunk_shape": [1, *array.shape],
        "codecs": zarr_codecs(array.codec, array.numpy_dtype.itemsize),
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [rows, *array.shape],
        "data_type": array.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [chunk, *array.shape]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0 if array.is_quantized else "NaN",
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "dimension_names": [ROW_AXIS, *array.axes],
        "attributes": {},
    }
