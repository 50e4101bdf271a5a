"""A table of file names and captions: CSV, or JSON Lines, one sample per row; the files lie in a folder or an archive.

Datasets of videos come so, and Hugging Face's `metadata.csv` beside images. Rows keep their order.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

from cache_store.errors import SourceError
from cache_store.format.tables import CLIP_START
from cache_store.storage.protocol import File
from precompute.sources.config import FieldNames
from precompute.sources.fields import conversation_of
from precompute.sources.images import ALL, ImageStore, Names
from precompute.sources.listing import Samples
from precompute.sources.llava import MAX_LINE_BYTES, ListedImages, begins_with_record, read_lines
from precompute.sources.media import VIDEOS, Media
from precompute.sources.parquet import USUAL_NAMES

FILE_COLUMNS = ("file_name", "path")
"""Usual names of the column of file names, for every kind of media; `video_path` and `image_path` too."""

CAPTION_COLUMNS = (*USUAL_NAMES["caption"], "prompt")

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
"""Matches a number as JSON writes it; other texts of a CSV stay texts, such as 007."""

Row = dict[str, Any]


class TableSource(ListedImages):
    """Rows of a CSV or of JSON Lines; the id is the file's name unless a column has it."""

    def __init__(self, open_list: Any, images: ImageStore, fields: FieldNames, media: Media) -> None:
        super().__init__(open_list, images, fields, media)
        self.needs_images = True
        """Otherwise rows are known by their ids, and may name no file."""
        self._usual = {
            "image": [fields.image] if fields.image else [*media.columns, *FILE_COLUMNS, f"{media.name}_path"],
            "id": [fields.id] if fields.id else [*USUAL_NAMES["id"]],
            "caption": [fields.caption] if fields.caption else [*CAPTION_COLUMNS],
        }
        self._required = [name for name in (fields.image, fields.id, fields.caption) if name]

    def samples(self, part: Names = ALL) -> Samples:
        file = self._open_list()
        rows = read_lines(file, Row, "expected an object on each line") if begins_with_record(file) else read_csv(file)
        return Samples(self._samples(rows, f"source.path: {file}"), extra=self._extra)

    def _samples(self, rows: Iterator[Row], where: str) -> Iterator[dict[str, object]]:
        for number, row in enumerate(rows):
            at = f"{where}: row {number} (counted from 0)"
            if missing := [name for name in self._required if name not in row]:
                raise SourceError(f"{at} has no {missing[0]}, which source.fields names; it has {', '.join(row)}")
            if self._media is VIDEOS and CLIP_START in row and CLIP_START not in self._extra:
                raise SourceError(
                    f"{where}: the column {CLIP_START} chooses the clips only if it is named: --source.fields.extra "
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
            yield {
                "id": uri if name is None else name,
                "uri": uri,
                "conversations": conversation_of(self._text(at, row, "caption")),
                "extra": {each: row.get(each) for each in self._extra},
                **self.locate(uri).columns(),
            }

    def _text(self, where: str, row: Row, field: str) -> str | None:
        """Return the first of a field's columns that has a value; a number counts as a text."""
        value = next((row[name] for name in self._usual[field] if row.get(name) not in (None, "")), None)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, int | float):
            return str(value)
        raise SourceError(f"{where}: its {field} is {type(value).__name__}, expected a text")


def read_csv(file: File) -> Iterator[Row]:
    """Yield the rows of a CSV, by the names of its first line; SourceError for broken ones."""
    with file.reopen() as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        try:
            csv.field_size_limit(MAX_LINE_BYTES)
            rows = csv.DictReader(text, restkey="", strict=True)
            names: Sequence[str] = rows.fieldnames or ()
            if names and names[0].lstrip().startswith("["):
                raise SourceError(f"source.path: {file} is a JSON list; write it as JSON Lines, one record a line")
            if not names:
                raise SourceError(f"source.path: {file} is empty; its first line must name the columns")
            if len({*names}) < len(names) or not any(names):
                raise SourceError(f"source.path: {file}: the first line must name each column once, got {names}")
            for row in rows:
                if row.get(""):
                    raise SourceError(f"source.path: {file}: line {rows.line_num} has more than {len(names)} values")
                yield {name: value_of(value) for name, value in row.items()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise SourceError(f"source.path: {file}: not a CSV in UTF-8: {error}") from None
        file.refuse_changed()


def value_of(text: str | None) -> str | int | float | None:
    """Return a CSV's value as a number if it is written as one; None if it is empty."""
    if not text:
        return None
    if (found := NUMBER.fullmatch(text)) is None:
        return text
    return float(text) if found[2] or found[3] else int(text)
