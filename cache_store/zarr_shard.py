"""The Zarr v3 form: one `sharding_indexed` shard file per unit of work, one sample per inner chunk.

Written by hand because a shard is a simple thing (chunks one after the other, then an index) and the stock writer
takes milliseconds a chunk at this size. Layout of a shard file, after the sharding codec's specification
(zarr-specs, v3, codecs/sharding-indexed):

    sample bytes, crc32c (4 bytes, little-endian)      for every cached row, in row order
    offset, length (two little-endian uint64)          for every row of a full shard; 2^64-1 twice where absent
    crc32c of the index (4 bytes, little-endian)
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from cache_store.checksum import crc32c
from cache_store.codec import zarr_codecs
from cache_store.errors import CacheError
from cache_store.formats import Location
from cache_store.schema import SPEC_ATTRIBUTE, SPEC_FILE, ArraySpec, CodecName, Spec, StoreDtype, canonical_json

ABSENT = np.uint64(2**64 - 1)
CRC = struct.Struct("<I")
DIMENSION_NAMES = ("sample", "channel", "latent_y", "latent_x")


class ZarrShardWriter:
    """Lays out one shard; `capacity` is samples_per_shard, also for a short last shard."""

    def __init__(self, stream: BinaryIO, capacity: int) -> None:
        self._stream = stream
        self._index = np.full((capacity, 2), ABSENT, "<u8")
        self._next = 0
        self._position = 0

    def append(self, payload: bytes | memoryview | None, content_sha256: str | None) -> Location | None:
        """Add the next row's encoded sample; None leaves the row absent."""
        slot, self._next = self._next, self._next + 1
        if payload is None:
            return None
        checksum = crc32c(payload)
        location = Location(self._position, len(payload), checksum)
        self._stream.write(payload)
        self._stream.write(CRC.pack(checksum))
        self._index[slot] = index_entry(location)
        self._position += location.length + CRC.size
        return location

    def finish(self) -> None:
        index = self._index.tobytes()
        self._stream.write(index)
        self._stream.write(CRC.pack(crc32c(index)))


class ZarrFormat:
    """Names and metadata of the Zarr form."""

    def unsupported(self, dtype: StoreDtype, codec: CodecName) -> str | None:
        return None

    def shard_file(self, array: str, shard: int) -> str:
        return f"{array}/c/{shard}/0/0/0"

    def writer(self, stream: BinaryIO, spec: Spec, array: str, planned: pa.Table) -> ZarrShardWriter:
        return ZarrShardWriter(stream, spec.samples_per_shard)

    def metadata(self, spec: Spec) -> dict[str, bytes]:
        """Contents of every metadata file, as functions of the spec alone.

        The group carries its arrays' metadata (consolidated), so that readers need not list the folder.
        """
        arrays = {name: array_metadata(spec, array) for name, array in spec.arrays.items()}
        group = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {SPEC_ATTRIBUTE: spec},
            "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": arrays},
        }
        files = {f"{name}/zarr.json": canonical_json(metadata) for name, metadata in arrays.items()}
        return {SPEC_FILE: canonical_json(group), **files}

    def structure_problems(
        self,
        data: memoryview,
        spec: Spec,
        array: str,
        shard: int,
        samples: pa.Table,
        locations: list[Location | None],
    ) -> Iterator[tuple[int | None, str]]:
        """What is wrong between the shard's own index and the samples table: (slot or None, problem)."""
        try:
            index = read_index(data, spec.samples_per_shard)
        except CacheError as error:
            yield None, str(error)
            return
        for slot, entry in enumerate(index.tolist()):
            location = locations[slot] if slot < len(locations) else None
            if entry != index_entry(location):
                yield slot, f"shard index says {entry}, samples table says {index_entry(location)}"
            elif location is not None and stored_crc(data, location) != location.crc32c:
                yield slot, "crc32c behind the sample differs from the samples table"


def index_entry(location: Location | None) -> list[int]:
    """A row's offset and length in the index; the length counts the crc32c behind the sample."""
    return [int(ABSENT)] * 2 if location is None else [location.offset, location.length + CRC.size]


def stored_crc(shard: memoryview, location: Location) -> int:
    (checksum,) = CRC.unpack_from(shard, location.offset + location.length)
    return int(checksum)


def read_index(shard: memoryview, capacity: int) -> np.ndarray:
    """The shard's index as uint64 [capacity, 2], its crc32c and every bound checked."""
    size = capacity * 16 + CRC.size
    if len(shard) < size:
        raise CacheError(f"shard is {len(shard)} bytes, too short for its index of {size}")
    raw = shard[-size : -CRC.size]
    if CRC.unpack(shard[-CRC.size :])[0] != crc32c(raw):
        raise CacheError("shard index does not match its crc32c")
    index = np.frombuffer(raw, "<u8").reshape(capacity, 2)
    present = index[(index != ABSENT).any(axis=1)]
    limit = np.uint64(len(shard) - size)
    if ((present[:, 0] > limit) | (present[:, 1] > limit - np.minimum(present[:, 0], limit))).any():
        raise CacheError("shard index points outside the shard")
    return index


def array_metadata(spec: Spec, array: ArraySpec) -> dict[str, object]:
    sharding = {
        "chunk_shape": [1, *array.shape],
        "codecs": zarr_codecs(array.codec, array.numpy_dtype.itemsize),
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [spec.rows, *array.shape],
        "data_type": array.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [spec.samples_per_shard, *array.shape]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": "NaN",
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "dimension_names": list(DIMENSION_NAMES),
        "attributes": {},
    }
