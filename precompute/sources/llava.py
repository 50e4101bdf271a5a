"""LLaVA's `chat.json` (LLaVA-CC3M-Pretrain-595K and its relatives): a list of id, image and conversations.

Or JSON Lines, a record a line: a file that begins with `{`. Of either, a few records at a time are in memory.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from cache_store.errors import SourceError
from cache_store.format.record import describe_mismatch
from cache_store.storage.verbs import File
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import MISSING
from precompute.sources.archives.image_store import HEAD_BYTES, ImageStore, expecting
from precompute.sources.archives.names import Samples
from precompute.sources.fields import Turn

T = TypeVar("T")

MAX_LINE_BYTES = 64 * 2**20
"""Of a record in JSON Lines; a conversation takes a few kilobytes."""

BLOCK_BYTES = 4 * 2**20
"""Of a list, read at a time."""

SPACE = "[ \\t\\n\\r]*"
BEFORE_FIRST, BEFORE_NEXT = (re.compile(rf"{SPACE}{mark}{SPACE}(?={{)") for mark in (r"\[", ","))
END, NO_RECORDS = re.compile(rf"{SPACE}\]{SPACE}"), re.compile(rf"{SPACE}\[{SPACE}\]{SPACE}")

RECORD = re.compile(r"^(it [a-z ]+, )?\[(\d+)\](?:\.|: )?")
"""The place that `describe_mismatch` names in a list: which record."""

EXPECTED = "expected LLaVA's list of records, or a record a line"


class ChatRecord(msgspec.Struct):
    """A record; fields that we do not use are ignored, as LLaVA's relatives add their own."""

    id: str | int
    conversations: list[Turn]
    image: str | None = None


class LlavaSource:
    """Samples of a chat.json, which is opened when they are listed, with images in a folder, a zip or a tar."""

    def __init__(self, open_list: Callable[[], File], images: ImageStore) -> None:
        self._open_list, self._images = open_list, images
        self.fingerprint, self._expect = self._images.fingerprint, expecting(images)

    def version(self) -> str | None:
        images = self._images.version()
        return images and f"{self._open_list().version.stamp} {images}"

    def samples(self) -> Samples:
        file = self._open_list()
        is_lines = begins_with_record(file)
        return Samples(map(self._sample, read_lines(file) if is_lines else read_list(file)), in_rows=is_lines)

    def _sample(self, record: ChatRecord) -> dict[str, object]:
        uri = record.image or ""
        turns = msgspec.to_builtins(record.conversations)
        return {"id": str(record.id), "uri": uri, "conversations": turns, "fingerprint": self.fingerprint(uri)}

    def expect(self, uris: Iterable[str]) -> None:
        self._expect(filter(None, uris))

    def read(self, uri: str) -> bytes:
        if not uri:
            raise Rejected(MISSING, "the record names no image")
        return self._images.read(uri)


def begins_with_record(file: File) -> bool:
    return file_part(file, HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")


def file_part(file: File, size: int) -> bytes:
    try:
        return file.part(0, size)
    except OSError as error:
        raise SourceError(f"source.path: {file}: {error.strerror}") from None


def read_list(file: File) -> Iterator[ChatRecord]:
    """Every record of a list; SourceError naming the record, or the byte where the file is no JSON.

    Where a record names a field twice, the last one counts, as in any reader of JSON.
    """
    count = 0
    try:
        for text in record_texts(file):
            yield msgspec.json.decode(text, type=ChatRecord)
            count += 1
    except (msgspec.DecodeError, ValueError, RecursionError):  # all of it in memory tells what is wrong, and where
        data = file_part(file, file.version.size)
        yield from decoded(data.removeprefix(codecs.BOM_UTF8), list[ChatRecord], f"source.path: {file}")[count:]


def record_texts(file: File) -> Iterator[str]:
    """The JSON of each record; ValueError where the file is no list of objects, or one is very large."""
    find_end, text, before = json.JSONDecoder().raw_decode, "", BEFORE_FIRST
    with file.reopen() as stream:
        blocks = iter(lambda: stream.read(BLOCK_BYTES), b"")
        for block in codecs.iterdecode(blocks, "utf-8-sig"):
            text, place = text + block, 0
            while found := before.match(text, place):
                try:
                    _, end = find_end(text, found.end())
                except json.JSONDecodeError:  # most often for want of the next block
                    break
                yield text[found.end() : end]
                place, before = end, BEFORE_NEXT
            text = text[place:]
            if len(text) > MAX_LINE_BYTES:
                raise ValueError("a record is too large to be looked for its end")
        file.refuse_changed()
    if not (END if before is BEFORE_NEXT else NO_RECORDS).fullmatch(text):
        raise ValueError("the end is missing, or not the end")


def read_lines(file: File) -> Iterator[ChatRecord]:
    """The record of each line that is not blank."""
    with file.reopen() as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), start=1):
            where = f"source.path: {file}: line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise SourceError(f"{where} has more than {MAX_LINE_BYTES:,} bytes; {EXPECTED}")
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                yield decoded(text, ChatRecord, where)


def decoded(data: bytes, kind: type[T], where: str) -> T:
    """What the JSON stands for; SourceError, naming the record of a list, where it is none or another kind."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        problem = "is nested too deeply"
    except UnicodeDecodeError:
        problem = not_utf8(data)
    except msgspec.DecodeError as error:
        problem = (
            RECORD.sub(r"record \2 (counted from 0): \1", describe_mismatch(error)) if data.strip() else "is empty"
        )
    raise SourceError(f"{where}: {problem}; {EXPECTED}")


def not_utf8(data: bytes) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    raise AssertionError("only called for such data")
