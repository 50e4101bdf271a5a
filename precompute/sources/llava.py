"""LLaVA's `chat.json` (LLaVA-CC3M-Pretrain-595K and its relatives): a list of id, image and conversations.

Or JSON Lines, a record a line, of which one line at a time is in memory: a file that begins with `{`.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from cache_store.errors import SourceError
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import MISSING
from precompute.sources.archives.image_store import HEAD_BYTES, Images
from precompute.sources.archives.listing import Samples
from precompute.sources.files.file import SourceFile
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
    """Samples of a chat.json, which is opened when they are listed, with images in a folder, a zip or a tar."""

    def __init__(self, open_list: Callable[[], SourceFile], images: Images) -> None:
        self._open_list, self._images = open_list, images
        self.fingerprint = self._images.fingerprint

    def samples(self) -> Samples:
        records = read_records(self._open_list())
        return Samples(map(self._sample, records), in_rows=not isinstance(records, list))

    def _sample(self, record: ChatRecord) -> dict[str, object]:
        uri = record.image or ""
        turns = msgspec.to_builtins(record.conversations)
        return {"id": str(record.id), "uri": uri, "conversations": turns, "fingerprint": self.fingerprint(uri)}

    def read(self, uri: str) -> bytes:
        if not uri:
            raise Rejected(MISSING, "the record names no image")
        return self._images.read(uri)


def read_records(file: SourceFile) -> Iterable[ChatRecord]:
    """Every record; SourceError naming the record or line, or the byte where the file is no JSON.

    Where a record names a field twice, the last one counts, as in any reader of JSON.
    """
    try:
        head = file.part(0, HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
        if head.lstrip().startswith(b"{"):
            return read_lines(file)
        data = file.part(0, file.version.size)
    except OSError as error:
        raise SourceError(f"source.path: {file}: {error.strerror}") from None
    return decoded(data.removeprefix(codecs.BOM_UTF8), list[ChatRecord], f"source.path: {file}")


def read_lines(file: SourceFile) -> Iterator[ChatRecord]:
    """The record of each line that is not blank."""
    with file.open() as stream:
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
        record = re.search(r"`\$\[(\d+)\]", str(error))
        problem = f"record {record[1]} (counted from 0): {error}" if record else str(error)
    raise SourceError(f"{where}: {problem}; {EXPECTED}")


def not_utf8(data: bytes) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    raise AssertionError("only called for such data")
