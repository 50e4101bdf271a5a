"""Encode a sample's values as bytes (raw, or blosc bitshuffle with zstd or lz4) and compute their checksum.

Blosc's threads stay off: they write a buffer's blocks in the order in which they finish, so that equal input
could give different bytes.

crc32c (Castagnoli's polynomial, as in Zarr's codec of that name and in iSCSI) comes from the AWS common runtime, which
uses AVX-512 if the processor has it: 49 GB/s, where google-crc32c and the package crc32c reach 28 (25 KB in the CPU
cache, one Zen 5 core). The checksum is a third of a checked read. It releases the GIL above 5 KB, so that two threads
check 25 KB samples on two cores.
"""

import struct
from typing import Any

import numpy as np
from awscrt.checksums import crc32c as crc32c
from numcodecs import blosc

blosc.use_threads = False

BLOSC_LEVEL = 5
BLOSC_HEADER = struct.Struct("<4xIII")
"""Versions and flags, then decoded bytes, block size, encoded bytes."""


def blosc_name(codec: str) -> str | None:
    """Return the compressor inside blosc, or None for the codec `none`, which only copies."""
    return {"none": None, "lz4": "lz4", "zstd": "zstd"}[codec]


def encode_sample(values: np.ndarray, codec: str) -> bytes:
    """Encode one C-contiguous little-endian sample; blosc shuffles by the size of a value."""
    name = blosc_name(codec)
    if name is None:
        return values.tobytes()
    integers = values.view(f"<u{values.itemsize}")
    compressed: bytes = blosc.compress(integers, name.encode(), BLOSC_LEVEL, blosc.BITSHUFFLE, 0)
    return compressed


def decode_sample(payload: memoryview, codec: str, target: np.ndarray) -> None:
    """Decode into `target`, a writable uint8 array of exactly the sample's size; ValueError if it does not fit."""
    if blosc_name(codec) is None:
        if len(payload) != target.nbytes:
            raise ValueError(f"holds {len(payload)} bytes, expected {target.nbytes}")
        target[:] = np.frombuffer(payload, np.uint8)
        return
    size, length = decoded_size(payload)
    if size != target.nbytes or length != len(payload):
        raise ValueError(f"declares {size} bytes in {length}, expected {target.nbytes} in {len(payload)}")
    try:
        blosc.decompress(payload, target)
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def decoded_size(payload: memoryview) -> tuple[int, int]:
    """Read decoded and encoded size, in bytes, from a blosc 1 header (BLOSC_HEADER_FORMAT in c-blosc)."""
    if len(payload) < BLOSC_HEADER.size:
        raise ValueError(f"is {len(payload)} bytes, less than a blosc header")
    size, _, length = BLOSC_HEADER.unpack_from(payload)
    return size, length


def zarr_codecs(codec: str, itemsize: int) -> list[dict[str, Any]]:
    """Return the codec chain of a Zarr v3 inner chunk, crc32c last."""
    chain: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if name := blosc_name(codec):
        configuration = {
            "typesize": itemsize,
            "cname": name,
            "clevel": BLOSC_LEVEL,
            "shuffle": "bitshuffle",
            "blocksize": 0,
        }
        chain.append({"name": "blosc", "configuration": configuration})
    return [*chain, {"name": "crc32c"}]
