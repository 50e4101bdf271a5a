"""Parquet files of images, as Hugging Face datasets writes them: a row is a sample.

Its image is a struct {bytes, path} or a binary column; a path in it is never followed. Only texts are read to plan, in
the order of the rows, and a row group is read once for the images of its rows: neighbours of a plan lie in it.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate

import msgspec
import pyarrow as pa

from cache_store.errors import CacheError, SourceError
from cache_store.format.record import misfit
from cache_store.format.tables import TableFile
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import MISSING, refuse_large
from precompute.sources.archives.listing import Samples
from precompute.sources.fields import FieldNames
from precompute.sources.files.file import SourceFile
from precompute.sources.source_files import SourceFiles
from precompute.sources.turns import Conversation, Turn, captioned

SUFFIX = ".parquet"

USUAL_NAMES = {
    "image": ("image", "img", "jpg", "jpeg", "png", "webp"),
    "id": ("id", "key", "__key__"),
    "caption": ("caption", "text", "txt"),
    "conversations": ("conversations",),
}
"""Of columns; the first that a file has."""

ROWS_AT_ONCE = 4_096
"""Rows of texts as Python objects."""

FILES_HELD = 64
"""Footers in memory."""

GROUPS_HELD = 2
"""Row groups whose images are in memory: a batch may begin in one and end in the next."""

MAX_GROUP_BYTES = 2**31 - 2**20
"""Of the images of a row group: Arrow's own bound on a binary array, nearly. Hugging Face datasets' take 100 MB."""


class ImageTable:
    """A Parquet file of images; SourceError where it is none, or has not the columns."""

    def __init__(self, file: SourceFile, fields: FieldNames) -> None:
        self._where = str(file)
        self._file = reading(lambda: TableFile(file.open, str(file)))
        self._columns = {name: self._column(name, getattr(fields, name)) for name in USUAL_NAMES}
        if self._columns["image"] is None:
            self._refuse("image", f"has no column {' or '.join(USUAL_NAMES['image'])}")
        self._refuse_other_types()
        groups = range(self._file.metadata.num_row_groups)
        self._ends = list(accumulate(self._file.metadata.row_group(number).num_rows for number in groups))
        self.num_rows = self._ends[-1] if self._ends else 0
        self.fingerprint = str(file.version)

    def _column(self, field: str, configured: str | None) -> str | None:
        """The column's name; None where there is none of the usual names."""
        names = self._file.schema.names
        name = configured or next((name for name in USUAL_NAMES[field] if name in names), None)
        if name is not None and (count := names.count(name)) != 1:
            self._refuse(field, f"has {count} columns {name}" if count else f"has no column {name}")
        return name

    def _refuse(self, field: str, problem: str) -> None:
        names = ", ".join(self._file.schema.names)
        raise SourceError(f"{self._where} {problem}; set source.fields.{field} to one of its columns: {names}")

    def _refuse_other_types(self) -> None:
        for field, (fits, expected) in TYPES.items():
            if (name := self._columns[field]) is not None and not fits(kind := self._file.schema.field(name).type):
                self._refuse(field, f"has a column {name} of type {kind}, expected {expected}")

    def samples(self) -> Iterator[tuple[str | None, Conversation]]:
        """Each row's id, None where there is no such column, and what is said of its image."""
        for row, texts in enumerate(self._texts()):
            id_, caption, turns = (texts.get(self._columns[field]) for field in ("id", "caption", "conversations"))
            if id_ is None and self._columns["id"] is not None:
                raise SourceError(f"{self._where}: row {row} has no {self._columns['id']}")
            conversation = captioned(str(caption or "")) if turns is None else self._conversation(row, turns)
            yield (None if id_ is None else str(id_)), conversation

    def _texts(self) -> Iterator[dict[str | None, object]]:
        """Each row's parts but the image, by column."""
        names = sorted({name for field, name in self._columns.items() if field != "image" and name is not None})
        for number in range(len(self._ends)):
            if names:
                group = reading(lambda: self._file.row_group(number, names))  # noqa: B023 (used at once)
                for batch in group.to_batches(max_chunksize=ROWS_AT_ONCE):
                    yield from batch.to_pylist()
            else:
                yield from ({} for _ in range(self._file.metadata.row_group(number).num_rows))

    def _conversation(self, row: int, turns_found: object) -> Conversation:
        try:
            turns = msgspec.convert(turns_found, list[Turn])
        except msgspec.ValidationError as error:
            raise SourceError(f"{self._where}: row {row}: conversations: {misfit(error)}") from None
        conversation: Conversation = msgspec.to_builtins(turns)
        return conversation

    def place(self, row: int) -> tuple[int, int]:
        """The row group of a row, and its place there."""
        group = bisect_right(self._ends, row)
        return group, row - (self._ends[group - 1] if group else 0)

    def images(self, group: int) -> pa.ChunkedArray:
        """Read the images of a row group."""
        name, metadata = self._columns["image"], self._file.metadata.row_group(group)
        columns = [metadata.column(number) for number in range(metadata.num_columns)]
        size = sum(each.total_uncompressed_size for each in columns if each.path_in_schema.split(".")[0] == name)
        if size > MAX_GROUP_BYTES:
            raise SourceError(
                f"{self._where}: row group {group} holds {size:,} bytes of images, more than {MAX_GROUP_BYTES:,}; "
                "write the file again with smaller row groups"
            )
        return reading(lambda: self._file.row_group(group, [name]))[name]


def is_image_type(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_conversation(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not pa.types.is_struct(turn := kind.value_type):
        return False
    places = [turn.get_field_index(name) for name in ("from", "value")]
    return min(places) >= 0 and all(is_text(turn.field(place).type) for place in places)


TYPES: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "image": (is_image_type, "a struct of bytes and path, or binary"),
    "id": (lambda kind: is_text(kind) or pa.types.is_integer(kind), "text or whole numbers"),
    "caption": (is_text, "text"),
    "conversations": (is_conversation, "lists of structs of from and value"),
}
"""Which types a field's column may have, and in words."""


class ParquetSource:
    """Rows of Parquet files; a uri is the file's name and the row's number in it, from 0."""

    def __init__(self, files: SourceFiles, fields: FieldNames) -> None:
        self._files, self._names, self._fields = files, frozenset(files.names), fields
        self.version = files.version
        self._lock = threading.Lock()
        """So that threads which read neighbours wait for one row group, and do not read one each."""
        self._table = lru_cache(FILES_HELD)(self._open_table)
        self._group = lru_cache(GROUPS_HELD)(self._read_group)
        self._table(files.names[0])  # what is no such file is said before a model is loaded

    def samples(self) -> Samples:
        """In the order of the files' rows; without a column of ids, their uris are."""
        return Samples(self._samples(), self._files.listing, in_rows=True)

    def _samples(self) -> Iterator[dict[str, object]]:
        for name in self._files.names:
            table = self._table(name)
            for row, (id_, turns) in enumerate(table.samples()):
                uri = f"{name}/{row}"
                fingerprint = table.fingerprint
                yield {
                    "id": uri if id_ is None else id_,
                    "uri": uri,
                    "conversations": turns,
                    "fingerprint": fingerprint,
                }

    def fingerprint(self, uri: str) -> str:
        """Of the whole file: its rows have no checksums of their own."""
        with self._lock:
            name, row = self._find(uri)
            return self._table(name).fingerprint if name and row < self._table(name).num_rows else MISSING

    def read(self, uri: str) -> bytes:
        with self._lock:
            name, row = self._find(uri)
            if not name or row >= self._table(name).num_rows:
                raise Rejected(MISSING, f"{uri} is no row of the source")
            group, place = self._table(name).place(row)
            image = self._group(name, group)[place]
        if pa.types.is_struct(image.type) and image.is_valid:
            image = image["bytes"]
        if not image.is_valid:
            raise Rejected(MISSING, f"{uri} holds no bytes of an image")
        data: bytes = image.as_py()
        refuse_large(uri, len(data))
        return data

    def _find(self, uri: str) -> tuple[str, int]:
        """The file and row of a uri; an empty name where the source has no such file."""
        name, _, row = uri.rpartition("/")
        is_row = row.isascii() and row.isdecimal() and len(row) <= 18
        return (name, int(row)) if name in self._names and is_row else ("", 0)

    def _open_table(self, name: str) -> ImageTable:
        return ImageTable(self._files.open(name), self._fields)

    def _read_group(self, name: str, group: int) -> pa.ChunkedArray:
        return self._table(name).images(group)


def reading(read: Callable[[], pa.Table]) -> pa.Table:
    """What `read` returns; SourceError in place of a CacheError."""
    try:
        return read()
    except CacheError as error:
        raise SourceError(str(error)) from None
