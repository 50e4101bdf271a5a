"""Samples that a list names, one a row: LLaVA's `chat.json`, or a table of file names and captions.

A list is JSON, JSON Lines or, if it is a table, CSV; the files lie in a folder or an archive. Rows keep their order.
"""

import codecs
import csv
import io
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from cache_store.errors import SourceError
from cache_store.format.record import describe_mismatch
from cache_store.format.tables import CLIP_START
from cache_store.storage.protocol import File
from precompute.images.not_images import HEAD_BYTES
from precompute.sources.config import FieldNames
from precompute.sources.fields import Turn, conversation_of
from precompute.sources.images import ALL, ImagesOf, ImageStore, Names, Source
from precompute.sources.listing import Samples
from precompute.sources.media import VIDEOS, Media
from precompute.sources.parquet import USUAL_NAMES

FILE_COLUMNS = ("file_name", "path")
"""Usual names of the column of file names, for every kind of media; `video_path` and `image_path` too."""

CAPTION_COLUMNS = (*USUAL_NAMES["caption"], "prompt")

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
"""Matches a number as JSON writes it; other texts of a CSV stay texts, such as 007."""

EXPECTED = "expected a list of records, or one record per line"

T = TypeVar("T")

Row = dict[str, Any]


class ListSource(ImagesOf, Source):
    def __init__(self, open_list: Callable[[], File], images: ImageStore, fields: FieldNames, media: Media) -> None:
        super().__init__(images)
        self._open_list, self._images_version, self._media = open_list, images.version, media
        self._extra = fields.extra or []

    def version(self, part: Names = ALL) -> str | None:
        images = self._images_version()
        return images and f"{self._open_list().version.stamp} {images}"

    def samples(self, part: Names = ALL) -> Samples:
        return Samples(self._samples(self._open_list()), extra=self._extra)

    @abstractmethod
    def _samples(self, file: File) -> Iterator[dict[str, object]]: ...

    def _sample(self, row: Row, uri: str, **texts: object) -> dict[str, object]:
        extra = {name: row.get(name) for name in self._extra}
        return {"uri": uri, "extra": extra, **texts, **self.locate(uri).columns()}


class ChatRecord(msgspec.Struct):
    """The fields used of LLaVA's records, beside the name of the file."""

    id: str | int
    conversations: list[Turn]
    image: str | None = None
    video: str | None = None


class LlavaSource(ListSource):
    """Samples of a chat.json; a record without an image is a sample of text only."""

    def _samples(self, file: File) -> Iterator[dict[str, object]]:
        for at, row in read_json(file):
            record = checked(partial(msgspec.convert, row, ChatRecord), at)
            uri = (record.video if self._media is VIDEOS else record.image) or ""
            yield self._sample(row, uri, id=str(record.id), conversations=msgspec.to_builtins(record.conversations))


class TableSource(ListSource):
    """Rows of a CSV or of JSON; the id is the file's name unless a column has it."""

    def __init__(self, open_list: Callable[[], File], images: ImageStore, fields: FieldNames, media: Media) -> None:
        super().__init__(open_list, images, fields, media)
        self.needs_images = True
        """Otherwise rows are known by their ids, and may name no file."""
        self._usual = {
            "image": [fields.image] if fields.image else [*media.columns, *FILE_COLUMNS, f"{media.name}_path"],
            "id": [fields.id] if fields.id else [*USUAL_NAMES["id"]],
            "caption": [fields.caption] if fields.caption else [*CAPTION_COLUMNS],
        }
        self._required = [name for name in (fields.image, fields.id, fields.caption) if name]

    def _samples(self, file: File) -> Iterator[dict[str, object]]:
        for at, row in read_json(file) if begins_with(file, b"{", b"[") else read_csv(file):
            if missing := [name for name in self._required if name not in row]:
                raise SourceError(f"{at} has no {missing[0]}, which source.fields names; it has {', '.join(row)}")
            if self._media is VIDEOS and CLIP_START in row and CLIP_START not in self._extra:
                raise SourceError(
                    f"{at}: the column {CLIP_START} chooses the clips only if it is named: --source.fields.extra "
                    f"'[{CLIP_START}]'; rename the column to choose them by clip.pick"
                )
            uri, name = self._text(at, row, "image"), self._text(at, row, "id")
            uri = uri if self.needs_images else uri or name
            if uri is None:
                expected = " or ".join(self._usual["image"])
                raise SourceError(
                    f"{at} names no {self._media.name}: expected a value in {expected}, or set source.fields.image; "
                    f"its columns are {', '.join(row)}"
                )
            turns = conversation_of(self._text(at, row, "caption"))
            yield self._sample(row, uri, id=uri if name is None else name, conversations=turns)

    def _text(self, where: str, row: Row, field: str) -> str | None:
        value = next((row[name] for name in self._usual[field] if row.get(name) not in (None, "")), None)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, int | float):
            return str(value)
        raise SourceError(f"{where}: its {field} is {type(value).__name__}, expected a text")


def read_json(file: File) -> Iterator[tuple[str, Row]]:
    """Yield the objects of a JSON list, which is read whole, or of JSON Lines, and where each stands."""
    where = f"source.path: {file}"
    if begins_with(file, b"["):
        data = file.part(0, file.version.size).removeprefix(codecs.BOM_UTF8)
        records = checked(partial(msgspec.json.decode, data, type=list[msgspec.Raw]), where)
        for number, record in enumerate(records):
            yield (at := f"{where}: record {number} (counted from 0)"), decode_row(record, at)
        return
    with file.reopen() as stream:
        for number, line in enumerate(stream, start=1):
            if text := line.removeprefix(codecs.BOM_UTF8).strip():
                yield (at := f"{where}: line {number}"), decode_row(text, at)
    file.refuse_changed()


def begins_with(file: File, *marks: bytes) -> bool:
    return file.part(0, HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(marks)


def decode_row(text: bytes | msgspec.Raw, where: str) -> Row:
    return checked(partial(msgspec.json.decode, text, type=Row), where)


def checked(decode: Callable[[], T], where: str) -> T:
    """Call `decode`; turn its errors about wrong JSON into SourceError."""
    try:
        return decode()
    except msgspec.DecodeError as error:
        problem = describe_mismatch(error)
    except (UnicodeDecodeError, RecursionError) as error:
        problem = str(error)
    raise SourceError(f"{where}: {problem}; {EXPECTED}")


def read_csv(file: File) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a CSV by the names of its first line, and where each stands."""
    where = f"source.path: {file}"
    with file.reopen() as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        try:
            rows = csv.DictReader(text, restkey="", strict=True)
            names: Sequence[str] = rows.fieldnames or ()
            if not names:
                raise SourceError(f"{where} is empty; its first line must name the columns")
            if len({*names}) < len(names) or not any(names):
                raise SourceError(f"{where}: the first line must name each column once, got {names}")
            for number, row in enumerate(rows):
                at = f"{where}: row {number} (counted from 0)"
                if row.get(""):
                    raise SourceError(f"{at} has more than {len(names)} values")
                yield at, {name: value_of(value) for name, value in row.items()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise SourceError(f"{where}: not a CSV in UTF-8: {error}") from None
        file.refuse_changed()


def value_of(text: str | None) -> str | int | float | None:
    if not text:
        return None
    if (found := NUMBER.fullmatch(text)) is None:
        return text
    return float(text) if found[2] or found[3] else int(text)
