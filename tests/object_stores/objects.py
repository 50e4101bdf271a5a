"""What lies in a bucket, seen and changed past the product and past the proxy."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import obstore
from obstore.store import AzureStore, S3Store

from tests.object_stores.server import ACCOUNT, ACCOUNT_KEY
from tests.places import Place


@dataclass(frozen=True)
class Objects(Place):
    """What lies below a URL, asked of the server itself."""

    url: str
    endpoint: str
    """The server's."""

    @property
    def address(self) -> str:
        return self.url

    @cached_property
    def store(self) -> Any:
        scheme, _, place = self.url.partition("://")
        bucket, _, folder = place.partition("/")
        options: Any = {"prefix": folder or None, "client_options": {"allow_http": True}}
        if scheme == "az":
            keys = {"account_name": ACCOUNT, "account_key": ACCOUNT_KEY}
            return AzureStore(bucket, endpoint=f"{self.endpoint}/{ACCOUNT}", **keys, **options)
        keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
        return S3Store(bucket, endpoint=self.endpoint, **keys, **options)

    def at(self, name: str) -> Self:
        return type(self)(f"{self.url}/{name}", self.endpoint)

    def read(self, name: str) -> bytes:
        return bytes(obstore.get(self.store, name).bytes())

    def put(self, name: str, data: bytes) -> None:
        obstore.put(self.store, name, data)

    def lose(self, *names: str) -> None:
        for name in names:
            obstore.delete(self.store, name)

    def files(self) -> dict[str, bytes]:
        return {name: self.read(name) for name in sorted(self.marks())}

    def marks(self) -> dict[str, object]:
        """When each was written, and what."""
        found = (each for page in obstore.list(self.store) for each in page)
        return {each["path"]: (each["last_modified"], each["e_tag"]) for each in found}
