"""Files in an object store: S3, GCS or Azure, by its client's own retries."""

from collections.abc import Iterator, Mapping
from typing import Any

from cache_store.errors import ConfigError
from cache_store.storage.object_client import ATTEMPTS, client, cut_short, telling
from precompute.sources.files.file import Version


class ObjectFolder:
    """Objects below a URL."""

    def __init__(self, url: str) -> None:
        scheme, _, place = url.partition("://")
        if not place.strip("/") or place.startswith("/"):
            raise ConfigError(f"source: {url} names no bucket; a URL is {scheme}://BUCKET/FOLDER/FILE")
        self._url = f"{scheme}://{place.rstrip('/')}"

    def __str__(self) -> str:
        return self._url

    def where(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def head(self, name: str) -> Version:
        with telling(self.where(name)):
            return version_of(client(self._url).head(name))

    def fetch(self, name: str, start: int, length: int) -> tuple[bytes, Version]:
        for _ in range(ATTEMPTS):
            with telling(self.where(name)):
                answer = client(self._url, length).get(name, options={"range": (start, start + length)})
                data, version = bytes(answer.bytes()), version_of(answer.meta)
            if len(data) == min(length, version.size - start):  # by Content-Range: Content-Length may be cut, too
                return data, version
        raise cut_short(self.where(name))

    def beginning(self, name: str, length: int) -> tuple[bytes, Version]:
        try:
            return self.fetch(name, 0, length)
        except FileNotFoundError:
            raise
        except OSError:
            if (version := self.head(name)).size:
                raise
            return b"", version  # of which no range can be had

    def files(self) -> Iterator[tuple[str, Version]]:
        with telling(self._url):
            for chunk in client(self._url).list(chunk_size=1_000):
                yield from ((each["path"], version_of(each)) for each in chunk if each["path"])


def version_of(meta: Mapping[str, Any]) -> Version:
    """By the ETag; where a store has none, by the time."""
    mark = meta["e_tag"] or meta["last_modified"].isoformat()
    return Version(meta["size"], mark.strip('"'))
