"""LLaVA's `chat.json` (LLaVA-CC3M-Pretrain-595K and its relatives): a list of id, image and conversations.

Or JSON Lines, a record a line, of which one line at a time is in memory: a file that begins with `{`.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from cache_store.errors import CacheError, SourceError
from cache_store.storage.files import refuse_irregular
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import MISSING
from precompute.sources.archives.image_store import HEAD_BYTES, open_image_store
from precompute.sources.archives.listing import Samples
from precompute.sources.turns import Turn

T = TypeVar("T")

MAX_LINE_BYTES = 64 * 2**20
"""Of a record in JSON Lines; a conversation takes a few kilobytes."""

EXPECTED = "expected LLaVA's list of records, or a record a line"


class ChatRecord(msgspec.Struct):
    """A record; fields that we do not use are ignored, as LLaVA's relatives add their own."""

    id: str | int
    conversations: list[Turn]
    image: str | None = None


class LlavaSource:
    """Samples of a chat.json with images in a folder, a zip or a tar."""

    def __init__(self, path: Path, images: Path | None) -> None:
        self._path = path
        self._images = open_image_store(images or path.parent)
        self.fingerprint = self._images.fingerprint

    def samples(self) -> Samples:
        records = read_records(self._path)
        return Samples(map(self._sample, records), in_rows=not isinstance(records, list))

    def _sample(self, record: ChatRecord) -> dict[str, object]:
        uri = record.image or ""
        turns = msgspec.to_builtins(record.conversations)
        return {"id": str(record.id), "uri": uri, "conversations": turns, "fingerprint": self.fingerprint(uri)}

    def read(self, uri: str) -> bytes:
        if not uri:
            raise Rejected(MISSING, "the record names no image")
        return self._images.read(uri)


def read_records(path: Path) -> Iterable[ChatRecord]:
    """Every record; SourceError naming the record or line, or the byte where the file is no JSON.

    Where a record names a field twice, the last one counts, as in any reader of JSON.
    """
    try:
        refuse_irregular(path)
        with path.open("rb") as stream:
            head = stream.read(HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
        if head.lstrip().startswith(b"{"):
            return read_lines(path)
        data = path.read_bytes()
    except CacheError as error:
        raise SourceError(f"source.path: {error}") from None
    except OSError as error:
        raise SourceError(f"source.path: {path}: {error.strerror}") from None
    return decoded(data.removeprefix(codecs.BOM_UTF8), list[ChatRecord], f"source.path: {path}")


def read_lines(path: Path) -> Iterator[ChatRecord]:
    """The record of each line that is not blank."""
    with path.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), start=1):
            where = f"source.path: {path}: line {number}"
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
        record = re.search(r"`\$\[(\d+)\]", str(error))
        problem = f"record {record[1]} (counted from 0): {error}" if record else str(error)
    raise SourceError(f"{where}: {problem}; {EXPECTED}")


def not_utf8(data: bytes) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    raise AssertionError("only called for such data")
