"""What lies in a bucket, seen and changed past the product and past the proxy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from tests.cache_store.conftest import contents


@dataclass(frozen=True)
class Objects:
    """Of one cache in a bucket, by their names in the cache."""

    url: str
    """Of the cache."""
    endpoint: str

    @property
    def store(self) -> Any:
        bucket, _, folder = self.url.removeprefix("s3://").partition("/")
        keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
        options: Any = {"endpoint": self.endpoint, "client_options": {"allow_http": True}, **keys}
        return S3Store(bucket, prefix=folder, **options)

    def all(self) -> dict[str, bytes]:
        names = sorted(each["path"] for page in obstore.list(self.store) for each in page)
        return {name: self.read(name) for name in names}

    def timeless(self) -> dict[str, bytes]:
        """All but the commit records, which have clocks in them."""
        return {name: data for name, data in self.all().items() if not name.startswith("commits/")}

    def read(self, name: str) -> bytes:
        return bytes(obstore.get(self.store, name).bytes())

    def put(self, name: str, data: bytes) -> None:
        obstore.put(self.store, name, data)

    def mirror(self, folder: Path) -> None:
        """Make what lies here what lies in a folder."""
        wanted, there = contents(folder), self.all()
        for name in there.keys() - wanted.keys():
            self.lose(name)
        for name, data in wanted.items() - there.items():
            self.put(name, data)

    def lose(self, name: str) -> None:
        obstore.delete(self.store, name)

    def places(self) -> dict[str, object]:
        """When each was written, and what."""
        found = (each for page in obstore.list(self.store) for each in page)
        return {each["path"]: (each["last_modified"], each["e_tag"]) for each in found}
