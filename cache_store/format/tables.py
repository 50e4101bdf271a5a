"""The Parquet files of a cache: their columns, and how they are read; a broken file always gives a CacheError."""

import errno
import hashlib
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache_store.errors import CacheError
from cache_store.format.array import ArrayRecipe
from cache_store.format.quantized import Scale
from cache_store.format.schema import MAX_SAMPLES_PER_SHARD

CONVERSATIONS = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))

PLACE = pa.struct(
    [
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("size", pa.int64()),
        ("crc32", pa.uint32()),
        ("deflated", pa.bool_()),
        ("problem", pa.string()),
    ]
)
"""Where an image lay in its archive when the plan was written; `precompute.sources.place` says what the fields are."""

CLIP_START = "clip_start"
"""Column of the plan: seconds from a video's first frame to the clip's; null for an image."""

PLAN_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("uri", pa.string()),
        (CLIP_START, pa.float64()),
        ("fingerprint", pa.string()),
        ("place", PLACE),
        ("state", pa.string()),
        ("size", pa.string()),
    ]
)
"""`fingerprint` identifies an image without reading it: a zip entry's CRC, or a file's size and time. `state` is
`PLANNED` or `WITHDRAWN`, `size` the name of the shard's array, the same in all rows of a row group."""

TEXTS_SCHEMA = pa.schema([("conversations", CONVERSATIONS)])
"""Columns of the texts of a part, which has extra ones behind them."""

TOKENS = "tokens"
"""Column that counts a text's tokens before it is cut, without the dropped ones of its template."""

SAMPLES_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("id", pa.string()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("content_sha256", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("resized_width", pa.int32()),
        ("resized_height", pa.int32()),
        ("crop_left", pa.int32()),
        ("crop_top", pa.int32()),
        (TOKENS, pa.int32()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("crc32c", pa.uint32()),
    ]
)
"""`width` and `height` are the image file's, `resized_…` those that the whole image was scaled to, `crop_…` is where
the sample's part begins in it, all in pixels; `tokens` is of texts. `offset` and `length` delimit the encoded latent in
its shard file; `crc32c` is over those bytes."""

REJECTED_SCHEMA = pa.schema([("row", pa.int64()), ("reason", pa.string())])
"""Columns of rejected.parquet, whose rows ascend."""

SCALE_COLUMNS = Scale._fields
"""Columns of quantized samples, after the others: lists of float32, one for each channel."""

USUAL_COLUMNS = ("row", "id", "uri", "conversations")
"""What names a sample and says what it shows."""

PLANNED_COLUMNS = ("uri", CLIP_START, "conversations", "place")
"""Columns that only the plan has; a reader adds them, and extra columns, to those of the samples table."""

WHOLE, REAL, NO_VALUES = "a whole number", "a number", "nothing"

EXTRA_TYPES = {
    "text": pa.string(),
    WHOLE: pa.int64(),
    REAL: pa.float64(),
    "true or false": pa.bool_(),
    "a list of texts": pa.list_(pa.string()),
    NO_VALUES: pa.null(),
}
"""Types of a plan's extra columns, which the source names, by what their values are in a part."""

TAKEN = frozenset({*PLAN_SCHEMA.names, *TEXTS_SCHEMA.names, *SAMPLES_SCHEMA.names, *SCALE_COLUMNS}) - {CLIP_START}
"""Names that no extra column can have; a source that has `clip_start` says where its clips begin."""

MAX_EXTRA, MAX_EXTRA_NAME = 32, 64
"""Most extra columns, and characters of a name: each column takes some hundred bytes of the footer for each shard."""

SUMS_KEY = "encode_once.sums"
"""Key in the footer of a samples table: the shard's sums, `ShardSums.data`, in base64."""

CACHED, REJECTED = "cached", "rejected"

PLANNED, WITHDRAWN = "planned", "withdrawn"
"""States of a planned row. A withdrawn sample was taken out of the cache on request: it is rejected for this reason,
only its row and id are left in the samples table, and in the plan what the digest covers.
"""


def samples_schema(array: ArrayRecipe) -> pa.Schema:
    if not array.is_quantized:
        return SAMPLES_SCHEMA
    # named as Parquet's readers name it, so that a copy of the table has the same bytes
    each_channel = pa.list_(pa.field("element", pa.float32()), array.features)
    return pa.schema([*SAMPLES_SCHEMA, *((name, each_channel) for name in SCALE_COLUMNS)])


def values_of(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return a column without nulls as an array: [N], or [N, C] if it holds lists."""
    if pa.types.is_fixed_size_list(column.type):
        lists: NDArray[Any] = column.combine_chunks().flatten().to_numpy()
        return lists.reshape(-1, column.type.list_size)
    values: NDArray[Any] = column.to_numpy()
    return values


def extra_problem(names: Sequence[str]) -> str | None:
    """Say why a plan cannot have extra columns of these names, or return None."""
    if len(names) > MAX_EXTRA:
        return f"{len(names):,} names, at most {MAX_EXTRA} can be"
    for place, name in enumerate(names):
        if not 0 < len(name) <= MAX_EXTRA_NAME or not name.isprintable() or "." in name:
            return f"{name[:MAX_EXTRA_NAME]!r} is no name of 1 to {MAX_EXTRA_NAME} printable characters without a dot"
        if name in TAKEN:
            return f"every cache has a column {name} already"
        if name in names[:place]:
            return f"{name} is named twice"
    return None


MAX_ROW_GROUP_BYTES = 2**32
"""Decompressed size, which allows 4 KB of text for each of a million samples."""

PARQUET_ERRORS = (OSError, pa.ArrowException, UnicodeDecodeError, KeyError)
"""Errors that Arrow raises for files that are missing, truncated or have flipped bits."""

MAX_FOOTER_BYTES = 64 * 2**20
"""Largest footer; it has about 100 bytes per column and row group, and takes a few MB in Hugging Face datasets."""
MAX_PART_FOOTER_BYTES = 2**30
"""Largest footer of a part of the plan, which takes some 900 bytes a shard."""

MAGIC = b"PAR1"

READ_BYTES = 2**20
"""Read buffer of a column that is read a few rows at a time."""


def leaves(kind: pa.DataType) -> Iterator[pa.DataType]:
    if not kind.num_fields:
        yield kind
    for place in range(kind.num_fields):
        yield from leaves(kind.field(place).type)


def is_text(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string))


class TableFile:
    """A Parquet file to read whole or by row group; its index is parsed once, and the sizes that it claims are bounded.

    Text is read as a dictionary, each value once. It is expanded only after its size is checked: otherwise a file of
    400 bytes could expand to terabytes.

    Arrow reads in the calling thread. If a thread of Arrow's frees our buffer while the interpreter exits, the program
    aborts (apache/arrow issue 34314): 6 of 750 programs that only read a plan did.
    """

    def __init__(
        self,
        open_file: Callable[[], BinaryIO | pa.NativeFile],
        where: str,
        max_footer_bytes: int = MAX_FOOTER_BYTES,
        opened: BinaryIO | None = None,
    ) -> None:
        """Open the file, or read the stream `opened` and leave it open; `where` names the file in messages."""
        self._open_file, self.where = open_file, where
        try:
            with nullcontext(opened) if opened else open_file() as stream:
                refuse_large_footer(stream, where, max_footer_bytes)
                file = pq.ParquetFile(stream, pre_buffer=False)
                self.metadata, self.schema = file.metadata, file.schema_arrow
                # Not by `metadata.schema`: the two would hold each other until garbage is collected.
                paths = [".".join(each) for each in file.reader.column_paths]
                self._places = {path: place for place, path in enumerate(paths)}
                kinds = (kind for field in self.schema for kind in leaves(field.type))
                self._texts = [path for path, kind in zip(paths, kinds, strict=False) if is_text(kind)]
        except PARQUET_ERRORS as error:
            raise self._broken(error) from None
        self._refuse_large_claims()

    def _refuse_large_claims(self) -> None:
        for number in range(self.metadata.num_row_groups):
            rows, size = (group := self.metadata.row_group(number)).num_rows, group.total_byte_size
            if not 0 <= rows <= MAX_SAMPLES_PER_SHARD or not 0 <= size <= MAX_ROW_GROUP_BYTES:
                raise CacheError(
                    f"{self.where} cannot be read: row group {number} claims {rows:,} rows, {size:,} bytes"
                )

    def column(self, number: int, name: str) -> Any:
        return self.metadata.row_group(number).column(self._places[name])

    def claimed_bytes(self, number: int, columns: Collection[str]) -> int:
        """Return the uncompressed size of a row group's columns, which may store each distinct value only once."""
        group = self.metadata.row_group(number)
        parts = map(group.column, range(group.num_columns))
        return sum(each.total_uncompressed_size for each in parts if each.path_in_schema.split(".")[0] in columns)

    def row_group(self, number: int, columns: list[str] | None = None) -> pa.Table:
        """Read one row group. The file is opened anew each time, so that threads and forks share no file position."""
        (group,) = self._row_groups([number], columns)
        return group

    def _row_groups(self, numbers: Iterable[int], columns: list[str] | None) -> list[pa.Table]:
        try:
            with self._open_file() as stream:
                file = pq.ParquetFile(
                    stream,
                    read_dictionary=self._texts,
                    metadata=self.metadata,
                    pre_buffer=False,
                    page_checksum_verification=True,
                )
                return [self._plain(file.read_row_group(number, columns, use_threads=False)) for number in numbers]
        except PARQUET_ERRORS as error:
            raise self._broken(error) from None

    def batches(self, number: int, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the columns of a row group, so many rows at a time, with one page of each in memory."""
        try:
            with self._open_file() as stream:
                file = pq.ParquetFile(stream, metadata=self.metadata, pre_buffer=False, buffer_size=READ_BYTES)
                for batch in file.iter_batches(rows, [number], columns, use_threads=False):
                    batch.validate(full=True)
                    yield batch
        except PARQUET_ERRORS as error:
            raise self._broken(error) from None

    def whole(self, columns: list[str] | None = None) -> pa.Table:
        groups = self._row_groups(range(self.metadata.num_row_groups), columns)
        names = self.schema.names if columns is None else [name for name in columns if name in self.schema.names]
        return pa.concat_tables(groups) if groups else self.schema.empty_table().select(names)

    def _plain(self, table: pa.Table) -> pa.Table:
        """Expand the dictionaries and validate every value, UTF-8 included; CacheError if the text is too large."""
        size = sum(text_bytes(chunk) for column in table.columns for chunk in column.chunks)
        if size > MAX_ROW_GROUP_BYTES:
            raise CacheError(f"{self.where} cannot be read: a row group holds {size:,} bytes of text")
        table = table.cast(pa.schema([self.schema.field(name) for name in table.column_names]))
        table.validate(full=True)
        return table

    def _broken(self, error: Exception) -> CacheError | OSError:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return CacheError(f"{self.where} is missing")
        if isinstance(error, MemoryError):
            return CacheError(f"{self.where} cannot be read: there is not enough memory")
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # a wrong offset is damage
            return error
        return CacheError(f"{self.where} is damaged: it is not a complete Parquet file")


def refuse_large_footer(stream: BinaryIO | pa.NativeFile, where: str, at_most: int) -> None:
    """Raise CacheError for a file without a footer, or with one larger than `at_most`: Arrow would read it whole."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - 8))
    length, magic = struct.unpack("<I4s", stream.read(8).rjust(8))
    if magic != MAGIC:
        raise CacheError(f"{where} is damaged: it is not a complete Parquet file")
    if length > at_most:
        raise CacheError(
            f"{where} cannot be read: its footer claims {length:,} bytes, at most {at_most:,} can be; it grows with "
            "the columns and the row groups, of which a plan has one a shard"
        )
    stream.seek(0)


def text_bytes(array: pa.Array) -> int:
    """Count the bytes of all texts in an array, nested ones included, as if dictionaries were expanded."""
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.binary_length(array.dictionary)
        return int(pc.sum(pc.take(lengths, array.indices).cast(pa.int64())).as_py() or 0)
    if isinstance(array, pa.ListArray):
        return text_bytes(array.flatten())
    if isinstance(array, pa.StructArray):
        return sum(map(text_bytes, array.flatten()))
    return 0


def parse_table(data: bytes, where: str, columns: list[str] | None = None) -> pa.Table:
    return TableFile(partial(pa.BufferReader, data), where).whole(columns)


def cut_texts(array: ArrayRecipe, samples: pa.Table) -> int:
    if array.text is None:
        return 0
    cached = samples.filter(pc.equal(samples["status"], CACHED))
    return int(pc.sum(pc.greater(cached[TOKENS], array.text.max_tokens)).as_py() or 0)


def rows_digest(rows: Iterable[int], ids: Iterable[str], contents: Iterable[str | None]) -> str:
    """Hash (row, id, content_sha256) of every sample, one JSON line each (SHA-256)."""
    lines = msgspec.json.Encoder().encode_lines(zip(rows, ids, contents, strict=True))
    return hashlib.sha256(lines).hexdigest()


def reason_kind(reason: str) -> str:
    """Return the kind under which a reason is counted: the words before its colon."""
    return reason.partition(":")[0]
