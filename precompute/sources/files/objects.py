"""Files in an object store: S3, GCS or Azure."""

from collections.abc import Iterator, Mapping
from typing import Any

from cache_store.storage.listing import UrlFolder
from cache_store.storage.objects.client import all_objects, ask, client
from cache_store.storage.objects.errors import CutShortError
from precompute.sources.files.file import Version


class ObjectFolder(UrlFolder):
    """Objects below a URL."""

    def head(self, name: str) -> Version:
        return ask(self.where(name), lambda: version_of(client(self.url).head(name)))

    def fetch(self, name: str, start: int, length: int) -> tuple[bytes, Version]:
        def whole() -> tuple[bytes, Version]:
            answer = client(self.url, length).get(name, options={"range": (start, start + length)})
            data, version = bytes(answer.bytes()), version_of(answer.meta)
            if len(data) != min(length, version.size - start):  # by Content-Range: Content-Length may be cut, too
                raise CutShortError
            return data, version

        return ask(self.where(name), whole)

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
        yield from ((each["path"], version_of(each)) for each in all_objects(self.url) if each["path"])


def version_of(meta: Mapping[str, Any]) -> Version:
    """By the ETag; where a store has none, by the time."""
    mark = meta["e_tag"] or meta["last_modified"].isoformat()
    return Version(meta["size"], mark.strip('"'))
