"""Files of data sets on the Hugging Face Hub, by HfFileSystem: with the environment's token, at its HF_ENDPOINT."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Self

from cache_store.errors import ConfigError
from cache_store.storage.listing import UrlFolder
from cache_store.storage.objects.errors import missing
from precompute.sources.files.file import Version

HUB = "hf"
"""The scheme."""


@lru_cache(maxsize=1)
def file_system() -> Any:
    from huggingface_hub import HfFileSystem  # a second to import

    return HfFileSystem()


class HubFolder(UrlFolder):
    """Files below `hf://datasets/OWNER/NAME`, of its main branch or of a revision: NAME@REVISION."""

    @classmethod
    def in_bucket(cls, scheme: str, place: str) -> Self:
        """ConfigError for a model's files, or any but a data set's."""
        if place.partition("/")[0] != "datasets":
            raise ConfigError(
                f"{scheme}://{place}: of the Hub only data sets are read; name {HUB}://datasets/OWNER/NAME/…"
            )
        return super().in_bucket(scheme, place)

    def __post_init__(self) -> None:
        file_system().invalidate_cache()  # what was listed for another source may be old

    def head(self, name: str) -> Version:
        with telling(self.where(name)):
            info = file_system().info(self.where(name))
        if info["type"] != "file":
            raise missing(self.where(name))
        return version_of(info)

    def fetch(self, name: str, start: int, length: int) -> tuple[bytes, Version]:
        with telling(self.where(name)), file_system().open(self.where(name), "rb", cache_type="none") as stream:
            stream.seek(start)
            data = stream.read(length)
        if len(data) != length:
            raise OSError(errno.EIO, "an answer of the Hub was cut short; run the same command again", self.where(name))
        return bytes(data), self.head(name)

    def beginning(self, name: str, length: int) -> tuple[bytes, Version]:
        length = min(length, (version := self.head(name)).size)
        return self.fetch(name, 0, length) if length else (b"", version)

    def files(self) -> Iterator[tuple[str, Version]]:
        with telling(self.url):
            found = file_system().find(self.url, detail=True)
        top = file_system()._strip_protocol(self.url)
        for path, info in found.items():
            yield path.removeprefix(top).lstrip("/"), version_of(info)


def version_of(info: Mapping[str, Any]) -> Version:
    """By the hash of the content, as Git has it."""
    return Version(info["size"], str(info.get("blob_id") or info.get("xet_hash")))


@contextmanager
def telling(where: str) -> Iterator[None]:
    """What the Hub refuses, as an OSError that names the address and what to check."""
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
