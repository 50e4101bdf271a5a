"""LLaVA's `chat.json` (LLaVA-CC3M-Pretrain-595K and its relatives): a list of id, image and conversations."""

import codecs
import re
from pathlib import Path

import msgspec

from cache_store.errors import CacheError, SourceError
from cache_store.storage.files import refuse_irregular
from precompute.images.rejected import Rejected
from precompute.sources.archive import MISSING
from precompute.sources.image_store import open_image_store
from precompute.sources.listing import Samples
from precompute.sources.turns import Turn


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
        return Samples(map(self._sample, read_records(self._path)))

    def _sample(self, record: ChatRecord) -> dict[str, object]:
        uri = record.image or ""
        turns = msgspec.to_builtins(record.conversations)
        return {"id": str(record.id), "uri": uri, "conversations": turns, "fingerprint": self.fingerprint(uri)}

    def read(self, uri: str) -> bytes:
        if not uri:
            raise Rejected(MISSING, "the record names no image")
        return self._images.read(uri)


def read_records(path: Path) -> list[ChatRecord]:
    """Every record; SourceError naming the record, or the byte where the file is no JSON.

    Where a record names a field twice, the last one counts, as in any reader of JSON.
    """
    try:
        refuse_irregular(path)
        data = path.read_bytes()
    except CacheError as error:
        raise SourceError(f"source.path: {error}") from None
    except OSError as error:
        raise SourceError(f"source.path: {path}: {error.strerror}") from None
    try:
        return msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8), type=list[ChatRecord])
    except RecursionError:
        problem = "is nested too deeply"
    except UnicodeDecodeError:
        problem = not_utf8(data)
    except msgspec.DecodeError as error:
        where = re.search(r"`\$\[(\d+)\]", str(error))
        problem = f"record {where[1]} (counted from 0): {error}" if where else str(error)
    raise SourceError(f"source.path: {path}: {problem}; expected LLaVA's list of records")


def not_utf8(data: bytes) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    raise AssertionError("only called for such data")
