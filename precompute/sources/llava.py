"""LLaVA's `chat.json` (LLaVA-CC3M-Pretrain-595K and its relatives): a list of id, image and conversations.

A file that begins with `{` is JSON Lines, one record per line. Only a few records are in memory at a time.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, TypeVar

import msgspec

from cache_store.errors import SourceError
from cache_store.format.record import describe_mismatch
from cache_store.storage.protocol import File
from precompute.images.rejected import Rejected
from precompute.sources.config import FieldNames
from precompute.sources.fields import Turn, extra_of, with_extra
from precompute.sources.image_store import HEAD_BYTES
from precompute.sources.images import ALL, ImagesOf, ImageStore, Names, Source
from precompute.sources.listing import Samples
from precompute.sources.media import IMAGES, Media
from precompute.sources.place import Place

T = TypeVar("T")

TEXT_ONLY = "text only"
"""Kind of reason for a record that names no image, such as some of LLaVA's instructions; no file is missing."""

MAX_LINE_BYTES = 64 * 2**20
"""Largest record that is read; a conversation takes a few kilobytes."""

BLOCK_BYTES = 4 * 2**20
"""Bytes of a list read at a time."""

SPACE = "[ \\t\\n\\r]*"
BEFORE_FIRST, BEFORE_NEXT = (re.compile(rf"{SPACE}{mark}{SPACE}(?={{)") for mark in (r"\[", ","))
LIST_END, EMPTY_LIST = re.compile(rf"{SPACE}\]{SPACE}"), re.compile(rf"{SPACE}\[{SPACE}\]{SPACE}")

RECORD_NUMBER = re.compile(r"^(it [a-z ]+, )?\[(\d+)\](?:\.|: )?")
"""Matches the number of the record that `describe_mismatch` names."""

EXPECTED = "expected LLaVA's list of records, or one record per line"


class ChatRecord(msgspec.Struct):
    """A record; other fields are ignored, because LLaVA's relatives add their own."""

    id: str | int
    conversations: list[Turn]
    image: str | None = None
    video: str | None = None


class ListedImages(ImagesOf, Source):
    """Images, or videos, that a list names, in a folder, a zip or a tar; the list is opened at each listing."""

    def __init__(self, open_list: Callable[[], File], images: ImageStore, fields: FieldNames, media: Media) -> None:
        super().__init__(images)
        self._open_list, self._images_version, self._media = open_list, images.version, media
        self._extra = fields.extra or []

    def version(self, part: Names = ALL) -> str | None:
        images = self._images_version()
        return images and f"{self._open_list().version.stamp} {images}"

    def expect(self, names: Iterable[str]) -> None:
        super().expect(filter(None, names))

    def open(self, name: str, place: Place | None = None) -> BinaryIO:
        self._refuse_text_only(name)
        return super().open(name, place)

    def read_head(self, name: str, place: Place | None = None) -> bytes:
        self._refuse_text_only(name)
        return super().read_head(name, place)

    def read(self, name: str, place: Place | None = None) -> bytes:
        self._refuse_text_only(name)
        return super().read(name, place)

    def _refuse_text_only(self, name: str) -> None:
        if not name:
            raise Rejected(TEXT_ONLY, f"the record names no {self._media.name}")


class LlavaSource(ListedImages):
    """Samples of a chat.json."""

    def samples(self, part: Names = ALL) -> Samples:
        file = self._open_list()
        is_lines, kind = begins_with_record(file), with_extra(ChatRecord, self._extra)
        records = read_lines(file, kind) if is_lines else read_list(file, kind)
        return Samples(map(self._sample, records), extra=self._extra)

    def _sample(self, record: ChatRecord) -> dict[str, object]:
        uri = (record.image if self._media is IMAGES else record.video) or ""
        turns = msgspec.to_builtins(record.conversations)
        extra = extra_of(record, self._extra)
        return {"id": str(record.id), "uri": uri, "conversations": turns, "extra": extra, **self.locate(uri).columns()}


def begins_with_record(file: File) -> bool:
    return file_part(file, HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")


def file_part(file: File, size: int) -> bytes:
    try:
        return file.part(0, size)
    except OSError as error:
        raise SourceError(f"source.path: {file}: {error.strerror}") from None


def read_list(file: File, kind: type[ChatRecord]) -> Iterator[ChatRecord]:
    """Yield every record of a list; raise SourceError naming the bad record, or the byte where the JSON is invalid.

    If a record has a field twice, the last one counts, as in any reader of JSON.
    """
    count = 0
    try:
        for text in record_texts(file):
            yield msgspec.json.decode(text, type=kind)
            count += 1
    except (msgspec.DecodeError, ValueError, RecursionError):  # decode the whole file to find what is wrong, and where
        data = file_part(file, file.version.size)
        yield from decode_json(data.removeprefix(codecs.BOM_UTF8), list[kind], f"source.path: {file}")[count:]  # type: ignore[valid-type]


def record_texts(file: File, block_bytes: int = BLOCK_BYTES) -> Iterator[str]:
    """Yield the JSON of each record; raise ValueError if the file is not a list of objects or one is too large."""
    find_end, text, before = json.JSONDecoder().raw_decode, "", BEFORE_FIRST
    with file.reopen() as stream:
        blocks = iter(lambda: stream.read(block_bytes), b"")
        for block in codecs.iterdecode(blocks, "utf-8-sig"):
            text, place = text + block, 0
            while found := before.match(text, place):
                try:
                    _, end = find_end(text, found.end())
                except json.JSONDecodeError:  # mostly because the record goes on in the next block
                    break
                yield text[found.end() : end]
                place, before = end, BEFORE_NEXT
            text = text[place:]
            if len(text) > MAX_LINE_BYTES:
                raise ValueError("a record is too large")
        file.refuse_changed()
    if not (LIST_END if before is BEFORE_NEXT else EMPTY_LIST).fullmatch(text):
        raise ValueError("the list's end is missing, or not at the file's end")


def read_lines(file: File, kind: type[T], expected: str = EXPECTED) -> Iterator[T]:
    """Yield the record of each line that is not blank."""
    with file.reopen() as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), start=1):
            where = f"source.path: {file}: line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise SourceError(f"{where} has more than {MAX_LINE_BYTES:,} bytes; {expected}")
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                yield decode_json(text, kind, where, expected)


def decode_json(data: bytes, kind: type[T], where: str, expected: str = EXPECTED) -> T:
    """Decode JSON as `kind`; raise SourceError, naming the record of a list, if it is invalid or of another kind."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        problem = "is nested too deeply"
    except UnicodeDecodeError:
        problem = describe_bad_utf8(data)
    except msgspec.DecodeError as error:
        problem = (
            RECORD_NUMBER.sub(r"record \2 (counted from 0): \1", describe_mismatch(error))
            if data.strip()
            else "is empty"
        )
    raise SourceError(f"{where}: {problem}; {expected}")


def describe_bad_utf8(data: bytes) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    raise AssertionError("only called for such data")
