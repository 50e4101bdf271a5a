"""Data sets on the Hugging Face Hub, to be read, by HfFileSystem: with the environment's token, at its HF_ENDPOINT."""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from cache_store.errors import ConfigError, install
from cache_store.storage.files import MAX_READ_BYTES, changed, cut_short, missing, too_large
from cache_store.storage.objects import UrlStore
from cache_store.storage.verbs import Data, Ranges, Version, read_only

HUB = "hf"
"""The scheme."""


@lru_cache(maxsize=1)
def file_system() -> Any:
    try:
        from huggingface_hub import HfFileSystem  # a second to import
    except ImportError:
        raise ConfigError(f"the Hub needs huggingface_hub, which is not installed; run {install('hub')}") from None

    return HfFileSystem()


@dataclass(frozen=True)
class HubStore(UrlStore):
    """Files below `hf://datasets/OWNER/NAME`, of its main branch or of a revision: NAME@REVISION; to be read."""

    @classmethod
    def in_bucket(cls, scheme: str, place: str) -> Self:
        """Make the store of a URL; ConfigError for any but a data set's."""
        if place.partition("/")[0] != "datasets":
            raise ConfigError(
                f"{scheme}://{place}: of the Hub only data sets are read; name {HUB}://datasets/OWNER/NAME/…"
            )
        return super().in_bucket(scheme, place)

    is_read_only = True

    def __post_init__(self) -> None:
        file_system().invalidate_cache()  # what was listed for another source may be old

    def stat(self, name: str) -> Version:
        with answering(self.where(name)):
            info = file_system().info(self.where(name))
        if info["type"] != "file":
            raise missing(self.where(name))
        return version_of(info)

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        if (version := self.stat(name)).size > at_most:
            raise too_large(self.where(name), version.size, at_most)
        return bytes(self._range(name, 0, version.size))

    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        return [self._ranges(each) for each in wanted]

    def _ranges(self, wanted: Ranges) -> list[memoryview]:
        parts = [self._range(wanted.name, *span) for span in zip(wanted.starts, wanted.lengths, strict=True)]
        if wanted.version is not None and self.stat(wanted.name) != wanted.version:
            raise changed(self.where(wanted.name))
        return parts

    def _range(self, name: str, start: int, length: int) -> memoryview:
        if not length:
            return memoryview(b"")
        with answering(self.where(name)), file_system().open(self.where(name), "rb", cache_type="none") as stream:
            stream.seek(start)
            data = memoryview(stream.read(length))
        if len(data) != length:
            raise cut_short(self.where(name))
        return data

    def list(self, folder: str = "") -> list[str]:
        with answering(f"{self.where(folder)}/"):
            try:
                found = file_system().ls(self.where(folder), detail=True)
            except FileNotFoundError:
                return []
        return sorted(each["name"].rpartition("/")[2] + "/" * (each["type"] != "file") for each in found)

    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        with answering(self.url):
            found = file_system().find(self.url, detail=True)
        top = file_system()._strip_protocol(self.url)
        each = ((path.removeprefix(top).lstrip("/"), version_of(info)) for path, info in sorted(found.items()))
        return ((name, version) for name, version in each if name > after)

    def put_whole(self, name: str, data: Data) -> None:
        raise read_only(self.where(name))

    def put_if_absent(self, name: str, data: Data) -> bool:
        raise read_only(self.where(name))

    def delete(self, name: str) -> None:
        raise read_only(self.where(name))


def version_of(info: Mapping[str, Any]) -> Version:
    """Return a version by the hash of the content, as Git has it."""
    return Version(info["size"], str(info.get("blob_id") or info.get("xet_hash")))


@contextmanager
def answering(where: str) -> Iterator[None]:
    """Raise what the Hub refuses as an OSError that names the address and what to check."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: whichever its HTTP library has
        EntryNotFoundError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except (FileNotFoundError, EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        if isinstance(error.__cause__ or error, RepositoryNotFoundError | RevisionNotFoundError):
            why = "the Hub has no such data set or revision, or it is private: check its name and HF_TOKEN"
            raise OSError(errno.ENXIO, why, where) from None
        raise missing(where) from None
    except (HTTPError, OSError, NotImplementedError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        raise OSError(errno.EIO, f"the Hub cannot be read: check the network and HF_TOKEN ({said})", where) from None
