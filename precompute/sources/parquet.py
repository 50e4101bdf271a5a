"""Parquet files of images, as Hugging Face datasets writes them: a row is a sample.

An image is a struct {bytes, path} or a binary column; its path is never followed. Planning reads only texts, in row
order. A uri is a file and a row; the file's footer says in which row group the row lies. A row group is read once for
the images of all its rows, because neighbours in the plan lie in one row group.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate

import msgspec
import pyarrow as pa

from cache_store.errors import CacheError, SourceError
from cache_store.format.record import describe_mismatch
from cache_store.format.tables import TableFile
from cache_store.messages import abridge
from cache_store.storage.protocol import File
from precompute.images.rejected import Rejected
from precompute.sources.config import FieldNames
from precompute.sources.fields import Conversation, Turn, captions_of, conversation_of
from precompute.sources.images import ALL, Names, Source
from precompute.sources.listing import MOST_NAMED, BadFiles, Samples
from precompute.sources.media import IMAGES, Media
from precompute.sources.place import MISSING, NOWHERE, Located, Place, refuse_large
from precompute.sources.source_files import SourceFiles

SUFFIX = ".parquet"

USUAL_NAMES = {
    "id": ("id", "key", "__key__"),
    "caption": ("caption", "text", "txt"),
    "conversations": ("conversations",),
}
"""Usual column names besides those of the media; the first one in the file is used."""

ROWS_AT_ONCE, BYTES_AT_ONCE = 64, 2**28
"""Rows that are read at a time; fewer if their values might take more than these bytes together."""

FILES_HELD = 64

GROUPS_HELD = 2
"""Row groups whose images are in memory: a batch may begin in one and end in the next."""

MAX_GROUP_BYTES = {"images": 2**31, "texts": 2**29}
"""Uncompressed bytes of a row group; Hugging Face datasets' take 100 MB. All images of one are in memory."""


class ImageTable:
    """A Parquet file of images; raises SourceError if it is not one or lacks the columns."""

    def __init__(self, file: File, fields: FieldNames, media: Media = IMAGES) -> None:
        self._where, usual = str(file), {"image": media.columns, **USUAL_NAMES}
        with source_errors():
            self._file = TableFile(file.reopen, str(file))
        self._columns = {name: self._column(name, getattr(fields, name), usual[name]) for name in usual}
        if self._columns["image"] is None:
            self._refuse("image", f"has no column {' or '.join(media.columns)} of {TYPES['image'][1]}")
        self._image = str(self._columns["image"])
        self._captions, self._extra = fields.captions or [], fields.extra or []
        for field, names in (("captions", self._captions), ("extra", self._extra)):
            for name in names:
                self._column(field, name)
        for field, (fits, expected) in TYPES.items():
            if (used := self._columns[field]) is not None and not fits(found := self._file.schema.field(used).type):
                self._refuse(field, f"has a column {used} of type {found}, expected {expected}")
        groups = range(self._file.metadata.num_row_groups)
        self._ends = list(accumulate(self._file.metadata.row_group(number).num_rows for number in groups))
        self.num_rows = self._ends[-1] if self._ends else 0
        self.located = Located(str(file.version))
        """The version of the whole file, because rows have no checksums of their own."""

    def _column(self, field: str, configured: str | None, usual: Sequence[str] = ()) -> str | None:
        names = self._file.schema.names
        name = configured or next((name for name in usual if name in names), None)
        if name is not None and (count := names.count(name)) != 1:
            self._refuse(field, f"has {count} columns {name}" if count else f"has no column {name}")
        return name

    def _refuse(self, field: str, problem: str) -> None:
        columns = abridge([f"{each.name} ({each.type})" for each in self._file.schema], most=MOST_NAMED)
        raise SourceError(f"{self._where} {problem}; source.fields.{field} may name one of its columns: {columns}")

    def samples(self) -> Iterator[tuple[str | None, Conversation, dict[str, object]]]:
        """Yield each row's id, None without an id column, its conversation, and its extra fields."""
        for row, texts in enumerate(self._texts()):
            id_, caption, turns = (texts.get(self._columns[field]) for field in ("id", "caption", "conversations"))
            if id_ is None and self._columns["id"] is not None:
                raise SourceError(f"{self._where}: row {row} has no {self._columns['id']}")
            captions = captions_of(f"{self._where}: row {row}", {name: texts[name] for name in self._captions})
            conversation = conversation_of(*(captions or ([] if caption is None else [str(caption)])))
            if turns is not None:
                conversation = self._conversation(row, turns)
            yield (None if id_ is None else str(id_)), conversation, {name: texts[name] for name in self._extra}

    def _texts(self) -> Iterator[dict[str | None, object]]:
        columns = [name for field, name in self._columns.items() if field != "image" and name is not None]
        names = sorted({*columns, *self._captions, *self._extra})
        for number in range(len(self._ends)):
            if names:
                for batch in self._batches("texts", number, names):
                    yield from batch.to_pylist()
            else:
                yield from ({} for _ in range(self._file.metadata.row_group(number).num_rows))

    def _conversation(self, row: int, turns_found: object) -> Conversation:
        try:
            turns: Conversation = msgspec.to_builtins(msgspec.convert(turns_found, list[Turn]))
        except msgspec.ValidationError as error:
            raise SourceError(f"{self._where}: row {row}: conversations: {describe_mismatch(error)}") from None
        return turns

    def place(self, row: int) -> tuple[int, int]:
        group = bisect_right(self._ends, row)
        return group, row - (self._ends[group - 1] if group else 0)

    def images(self, group: int) -> Iterator[bytes | None]:
        for batch in self._batches("images", group, [self._image]):
            for image in batch.column(0):
                yield image["bytes"].as_py() if pa.types.is_struct(image.type) and image.is_valid else image.as_py()

    def _batches(self, what: str, group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield a row group's columns a few rows at a time; SourceError if they take too many bytes."""
        claimed, decoded = self._file.claimed_bytes(group, columns), 0
        self._refuse_large(what, group, claimed)
        rows = max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE // max(claimed, 1)))
        with source_errors():
            for batch in self._file.batches(group, columns, rows):
                decoded += batch.nbytes
                self._refuse_large(what, group, decoded)
                yield batch

    def _refuse_large(self, what: str, group: int, size: int) -> None:
        if size > (most := MAX_GROUP_BYTES[what]):
            raise SourceError(
                f"{self._where}: row group {group} is too large, with more than {most:,} bytes of {what}; "
                "write the file again with smaller row groups"
            )


def is_image_type(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


TYPES: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "image": (is_image_type, "a struct of bytes and path, or binary"),
    "id": (lambda kind: is_text(kind) or pa.types.is_integer(kind), "text or whole numbers"),
    "caption": (is_text, "text"),
}


class ParquetSource(Source):
    """Rows of Parquet files; a uri is the file's name and the row's number in it, from 0."""

    def __init__(self, files: SourceFiles, fields: FieldNames, media: Media = IMAGES) -> None:
        self._files, self._names, self._fields, self._media = files, frozenset(files.names), fields, media
        self._extra = fields.extra or []
        self._lock = threading.Lock()
        """Makes threads that need the same row group wait for one read."""
        self._table = lru_cache(FILES_HELD)(self._open_table)
        self._images = lru_cache(GROUPS_HELD)(lambda name, group: [*self._table(name).images(group)])
        self._table(files.names[0])  # report an unusable file before a model is loaded

    def version(self, part: Names = ALL) -> str | None:
        return self._files.version(part)

    def parts(self, rows: int) -> Sequence[Names]:
        return self._files.grouped(rows, self._table(self._files.names[0]).num_rows)

    def samples(self, part: Names = ALL) -> Samples:
        return Samples(self._samples(part or self._files.names), self._files.skipped_in(part), extra=self._extra)

    def _samples(self, names: Sequence[str]) -> Iterator[dict[str, object]]:
        bad = BadFiles()
        for name in names:
            with bad.collecting():
                table = self._table(name)
                for row, (id_, turns, extra) in enumerate(table.samples()):
                    uri, columns = f"{name}/{row}", table.located.columns()
                    id_ = uri if id_ is None else id_
                    yield {"id": id_, "uri": uri, "conversations": turns, "extra": extra, **columns}
        bad.refuse()

    def locate(self, name: str) -> Located:
        with self._lock:
            file, row = self._find(name)
            return self._table(file).located if file and row < self._table(file).num_rows else NOWHERE

    def read(self, name: str, place: Place | None = None) -> bytes:
        with self._lock:
            file, row = self._find(name)
            if not file or row >= self._table(file).num_rows:
                raise Rejected(MISSING, f"{name} is no row of the source")
            group, number = self._table(file).place(row)
            image = self._images(file, group)[number]
        if image is None:
            raise Rejected("no image", f"{name} holds no bytes")
        refuse_large(name, len(image))
        return image

    def _find(self, uri: str) -> tuple[str, int]:
        name, _, row = uri.rpartition("/")
        is_row = row.isascii() and row.isdecimal() and len(row) <= 18
        return (name, int(row)) if name in self._names and is_row else ("", 0)

    def _open_table(self, name: str) -> ImageTable:
        return ImageTable(self._files.open(name), self._fields, self._media)


@contextmanager
def source_errors() -> Iterator[None]:
    try:
        yield
    except CacheError as error:
        raise SourceError(str(error)) from None
