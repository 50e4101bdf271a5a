"""Addresses of stores, and messages about wrong ones."""

import sys

import pytest

from cache_store.errors import ConfigError
from cache_store.storage.store import open_store


@pytest.mark.parametrize("address", ["ftp://host/cache", "s3://", "s3:/bucket/cache", "gs:///folder"])
def test_an_address_that_can_hold_no_cache_is_refused(address):
    with pytest.raises(ConfigError, match=f"^{address} .*{address[:2].replace('ft', 's3')}://"):
        open_store(address)


def test_an_object_store_is_named_by_its_url_without_a_slash():
    assert str(open_store("s3://bucket/a/cache/")) == "s3://bucket/a/cache"
    assert open_store("s3://bucket/a/cache/") == open_store("s3://bucket/a/cache") != open_store("s3://bucket/a")
    assert open_store("az://container/cache").where("seal.json") == "az://container/cache/seal.json"


def test_without_obstore_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"`pip install 'encode-once\[object-stores\]'`"):
        open_store("s3://without-obstore/cache").list()
