"""The WebDataset form: one uncompressed USTAR archive per unit of work, two members per cached row.

The bytes are written by hand, like those of the Zarr form: equal rows then give equal bytes with any tar library, and
verification knows every expected byte. Layout of a shard file, for every cached row, in row order:

    header of `{row:012d}.latent.npy` (512 bytes), .npy header (128 bytes), the latent's values, zeros to 512
    header of `{row:012d}.json` (512 bytes), the sample as JSON, zeros to 512

The file ends with at least two blocks of zeros, filled up to a multiple of 10,240 bytes, as tar programs do.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.format.array import ArraySpec, CodecName, StoreDtype
from cache_store.format.codec import crc32c
from cache_store.format.layout import SPEC_ATTRIBUTE, SPEC_FILE
from cache_store.format.record import canonical_json
from cache_store.format.schema import Spec
from cache_store.format.shards import NOWHERE, EncodedRows, Location, ShardSamples
from cache_store.format.tables import TOKENS

BLOCK_BYTES = 512
RECORD_BYTES = 20 * BLOCK_BYTES
NPY_HEADER_BYTES = 128

ROW_DIGITS = 12
LATENT_SUFFIX = b".latent.npy"
JSON_SUFFIX = b".json"

CODECS = ("none",)
DTYPES = ("float16", "float32")

HEADER = struct.Struct("100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s155s12x")
"""Fields of a POSIX.1-1988 (ustar) header: name, mode, uid, gid, size, mtime, checksum, type, link, magic, version,
owner names, device numbers, prefix.
"""

ENCODER = msgspec.json.Encoder(order="sorted")


SAMPLES_AT_ONCE = 1_024
"""Rows held as Python objects at a time."""

HEADERS_KEPT = 16_384
"""Headers cached, 500 bytes each: a shard needs about thirty digit sums times a few hundred JSON sizes."""


class TarShardWriter:
    """Writes one shard, whose rows begin at `first`; `planned` has its samples."""

    def __init__(self, stream: BinaryIO, array: ArraySpec, first: int, planned: pa.Table) -> None:
        self._stream, self._layout = stream, RowLayout(array)
        self._samples = iterate_samples(first, planned)
        self._position = 0

    def append(self, rows: EncodedRows) -> NDArray[np.int64]:
        """Add the next rows; return their places [N, 3]: offset, length and crc32c, or -1 for an absent row."""
        places = np.full((len(rows.kept), 3), NOWHERE, np.int64)
        payloads = zip(rows.payloads, rows.checksums.tolist(), strict=True)
        facts = zip(rows.kept.tolist(), rows.contents, rows.tokens, strict=True)
        for number, (is_kept, content, count) in enumerate(facts):
            row, name, uri, conversations = next(self._samples)
            if not is_kept:
                continue
            payload, checksum = next(payloads)
            before, after = self._layout.around_latent(row, sample_json(name, uri, conversations, content, count))
            places[number] = self._position + len(before), len(payload), checksum
            self._stream.write(b"".join((before, payload, after)))
            self._position += len(before) + len(payload) + len(after)
        return places

    def finish(self) -> None:
        self._stream.write(bytes(num_end_zeros(self._position)))


class TarFormat:
    """Names and metadata of the WebDataset form."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    @staticmethod
    def unsupported(dtype: StoreDtype, codec: CodecName) -> str | None:
        if codec not in CODECS:
            return f"tars hold uncompressed samples, for any tar reader; set store.codec none, codec {codec} needs zarr"
        if dtype not in DTYPES:
            return f"tars hold dtype float16 or float32, which numpy's .npy has names for; {dtype} needs format zarr"
        return None

    def shard_file(self, shard: int) -> str:
        return f"shards/{shard:06d}.tar"

    def writer(self, stream: BinaryIO, shard: int, planned: pa.Table) -> TarShardWriter:
        return TarShardWriter(stream, self._spec.array_of(shard), self._spec.shard_rows(shard).start, planned)

    def metadata(self) -> dict[str, bytes]:
        """Return the Zarr group that holds the spec; the tars describe themselves."""
        group = {"zarr_format": 3, "node_type": "group", "attributes": {SPEC_ATTRIBUTE: self._spec}}
        return {SPEC_FILE: canonical_json(group)}

    def proof(self, data: memoryview, locations: Sequence[Location | None]) -> int:
        first = next(filter(None, locations), Location(0, 0, 0))
        return int(crc32c(data[: first.offset + first.length]))

    def structure_problems(self, data: memoryview, samples: ShardSamples) -> Iterator[tuple[int | None, str]]:
        """Compare every byte outside the latents with what plan and samples table imply: (slot or None, difference)."""
        if samples.planned is None:
            return
        layout = RowLayout(samples.array)
        contents, tokens, position = *(samples.table[name].to_pylist() for name in ("content_sha256", TOKENS)), 0
        each = iterate_samples(samples.rows.start, samples.planned)
        for slot, (row, name, uri, conversations) in enumerate(each):
            location = samples.locations[slot]
            if location is None:
                continue
            text = sample_json(name, uri, conversations, contents[slot], tokens[slot])
            before, after = layout.around_latent(row, text)
            offset = position + len(before)
            if location.offset != offset or location.length != layout.latent_bytes:
                found = f"[{location.offset}, {location.offset + location.length})"
                yield slot, f"samples table says bytes {found}, expected {offset} on"
            if bytes(data[position:offset]) != before:  # as bytes: comparing a memoryview is slow, item by item
                yield slot, "the headers before the latent are not what they should be"
            end = offset + layout.latent_bytes
            position = end + len(after)
            if bytes(data[end:position]) != after:
                yield slot, "the JSON member does not match plan and samples table"
        if data[position:] != bytes(num_end_zeros(position)):
            yield None, f"does not end as a tar after byte {position}"


def iterate_samples(first: int, table: pa.Table) -> Iterator[tuple[Any, ...]]:
    for batch in table.select(["id", "uri", "conversations"]).to_batches(max_chunksize=SAMPLES_AT_ONCE):
        rows = range(first, first + batch.num_rows)
        yield from zip(rows, *(column.to_pylist() for column in batch.columns), strict=True)
        first += batch.num_rows


class RowLayout:
    """The tar and .npy bytes around the values of each row."""

    def __init__(self, array: ArraySpec) -> None:
        self.latent_bytes = array.sample_bytes
        self._npy_bytes = NPY_HEADER_BYTES + array.sample_bytes
        self._npy_header = npy_header(array.dtype, array.shape)
        self._npy_padding = padding(self._npy_bytes)

    def around_latent(self, row: int, text: bytes) -> tuple[bytes, bytes]:
        """Return the bytes before a row's values and those after them; `text` is the sample as JSON."""
        size, digits = len(text), b"%0*d" % (ROW_DIGITS, row)
        digits_sum = sum(digits)
        before = (digits, header_after_digits(LATENT_SUFFIX, self._npy_bytes, digits_sum), self._npy_header)
        json_header = header_after_digits(JSON_SUFFIX, size, digits_sum)
        return b"".join(before), b"".join((self._npy_padding, digits, json_header, text, padding(size)))


def sample_json(
    name: str, uri: str, conversations: list[dict[str, str]], content_sha256: str | None, tokens: int | None
) -> bytes:
    """Encode the JSON member of a row; `tokens` is a text's number of tokens, None for an image."""
    counted = {} if tokens is None else {TOKENS: tokens}
    return ENCODER.encode({"conversations": conversations, "id": name, "sha256": content_sha256, **counted, "uri": uri})


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Make the header of a .npy file (version 1.0, C order) exactly as numpy writes it (see numpy.lib.format)."""
    kind = {"float16": "<f2", "float32": "<f4"}[dtype]
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    text = text.ljust(NPY_HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@lru_cache(maxsize=HEADERS_KEPT)
def header_after_digits(suffix: bytes, size: int, digits_sum: int) -> bytes:
    """Make a header without the row's digits, on whose sum alone it depends: mode 644, uid and gid 0, time 0."""
    no_digits, size_field = bytes(ROW_DIGITS), b"%011o\0" % size
    checksum = digits_sum + sum(suffix) + sum(size_field) + OTHER_FIELDS_SUM
    return pack_header(no_digits + suffix, size_field, b"%06o\0 " % checksum)[ROW_DIGITS:]


def pack_header(name: bytes, size: bytes, checksum: bytes) -> bytes:
    mode, nobody, date, no_names = b"0000644\0", (b"0000000\0",) * 2, b"%011o\0" % 0, (b"",) * 5
    return HEADER.pack(name, mode, *nobody, size, date, checksum, b"0", b"", b"ustar\0", b"00", *no_names)


OTHER_FIELDS_SUM = sum(pack_header(b"", b"", b" " * 8))
"""A header's checksum is the sum of its bytes, itself counted as spaces; all but name and size are constant."""


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK_BYTES)


def num_end_zeros(position: int) -> int:
    return 2 * BLOCK_BYTES + -(position + 2 * BLOCK_BYTES) % RECORD_BYTES
