"""Read data sets on the Hugging Face Hub through HfFileSystem, with the environment's token and HF_ENDPOINT."""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from json import JSONDecodeError
from typing import Any, Self

from cache_store.errors import ConfigError, install
from cache_store.storage.protocol import (
    MAX_READ_BYTES,
    Data,
    Ranges,
    Version,
    changed_error,
    cut_short_error,
    missing_error,
    read_only_error,
    too_large_error,
)
from cache_store.storage.remote import UrlStore

HUB = "hf"
"""The scheme of its URLs."""

ADDRESS = f"name {HUB}://datasets/OWNER/NAME/…"


@lru_cache(maxsize=1)
def file_system() -> Any:
    try:
        from huggingface_hub import HfFileSystem  # a second to import
    except ImportError:
        raise ConfigError(f"the Hub needs huggingface_hub, which is not installed; run {install('hub')}") from None

    return HfFileSystem()


@dataclass(frozen=True)
class HubStore(UrlStore):
    """A read-only store below `hf://datasets/OWNER/NAME`: its main branch, or a revision as NAME@REVISION."""

    @classmethod
    def in_bucket(cls, scheme: str, place: str) -> Self:
        if place.partition("/")[0] != "datasets":
            raise ConfigError(f"{scheme}://{place}: only data sets of the Hub can be read; {ADDRESS}")
        return super().in_bucket(scheme, place)

    is_read_only = True

    def __post_init__(self) -> None:
        file_system().invalidate_cache()  # an earlier listing may be out of date

    def stat(self, name: str) -> Version:
        return self._ask(lambda: self._stat(name))

    def _stat(self, name: str) -> Version:
        with explain_hub_errors(self.where(name)):
            info = file_system().info(self.where(name))
        if info["type"] != "file":
            raise missing_error(self.where(name))
        return version_of_info(info)

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        if (version := self.stat(name)).size > at_most:
            raise too_large_error(self.where(name), version.size, at_most)
        return bytes(self._ask(lambda: self._range(name, 0, version.size)))

    def _fetch_file(self, wanted: Ranges) -> Sequence[memoryview]:
        return self._ask(lambda: self._ranges(wanted))

    def _ranges(self, wanted: Ranges) -> Sequence[memoryview]:
        parts = [self._range(wanted.name, *span) for span in zip(wanted.starts, wanted.lengths, strict=True)]
        if wanted.version is not None and self._stat(wanted.name) != wanted.version:
            raise changed_error(self.where(wanted.name))
        return parts

    def _range(self, name: str, start: int, length: int) -> memoryview:
        if not length:
            return memoryview(b"")
        with explain_hub_errors(self.where(name)):
            found = file_system().cat_file(self.where(name), start, start + length, cache_type="none")
        data = memoryview(found)
        if len(data) != length:
            raise cut_short_error(self.where(name))
        return data

    def list(self, folder: str = "") -> list[str]:
        ask = explain_hub_errors(f"{self.where(folder)}/")(lambda: file_system().ls(self.where(folder), detail=True))
        try:
            found = self._ask(ask)
        except FileNotFoundError:
            return []
        return sorted(each["name"].rpartition("/")[2] + "/" * (each["type"] != "file") for each in found)

    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        found = self._ask(explain_hub_errors(self.url)(lambda: file_system().find(self.url, detail=True)))
        top = file_system()._strip_protocol(self.url)
        each = ((path.removeprefix(top).lstrip("/"), version_of_info(info)) for path, info in sorted(found.items()))
        return ((name, version) for name, version in each if name > after)

    def put_whole(self, name: str, data: Data) -> None:
        raise read_only_error(self.where(name))

    def put_if_absent(self, name: str, data: Data) -> bool:
        raise read_only_error(self.where(name))

    def delete(self, name: str) -> None:
        raise read_only_error(self.where(name))


def version_of_info(info: Mapping[str, Any]) -> Version:
    # Git's hash of the content.
    return Version(info["size"], str(info.get("blob_id") or info.get("xet_hash")))


@contextmanager
def explain_hub_errors(where: str) -> Iterator[None]:
    """Raise errors of the network and the Hub as OSErrors that name the address and what to check."""
    from huggingface_hub.errors import EntryNotFoundError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError  # type: ignore[attr-defined]  # HTTPError: whichever its HTTP library has

    try:
        yield
    except (FileNotFoundError, EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        if isinstance(error.__cause__ or error, RepositoryNotFoundError | RevisionNotFoundError):
            why = "the Hub has no such data set or revision, or it is private: check its name and HF_TOKEN"
            raise OSError(errno.ENXIO, why, where) from None
        raise missing_error(where) from None
    except (HTTPError, OSError, JSONDecodeError) as error:  # JSONDecodeError: a login page of the network, say
        why = f"the Hub cannot be read: check the network and HF_TOKEN ({first_words(error)})"
        raise OSError(errno.EIO, why, where) from None
    except ValueError as error:  # an address without OWNER/NAME, or with characters that the Hub does not allow
        raise ConfigError(f"{where} names no data set; {ADDRESS} ({first_words(error)})") from None


def first_words(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
