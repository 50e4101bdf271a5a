"""Addresses of stores, and messages about wrong ones."""

import sys

import pytest

from cache_store.errors import ConfigError
from cache_store.storage.store import open_store


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("ftp://host/cache", "has an unsupported scheme; name a folder, or one of s3://, gs://, az://, hf://"),
        ("s3://", "names no bucket; a URL is s3://BUCKET/FOLDER"),
        ("s3:/bucket/cache", "has one slash too few; a URL is s3://BUCKET/FOLDER"),
        ("gs:///folder", "names no bucket; a URL is gs://BUCKET/FOLDER"),
    ],
)
def test_an_address_that_can_hold_no_cache_is_refused(address, error):
    with pytest.raises(ConfigError) as refused:
        open_store(address)
    assert str(refused.value) == f"{address} {error}"


def test_an_object_store_is_named_by_its_url_without_a_slash():
    assert str(open_store("s3://bucket/a/cache/")) == "s3://bucket/a/cache"
    assert open_store("s3://bucket/a/cache/") == open_store("s3://bucket/a/cache") != open_store("s3://bucket/a")
    assert open_store("az://container/cache").where("seal.json") == "az://container/cache/seal.json"


def test_without_obstore_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"not installed; run `pip install 'encode-once\[object-stores\]'`"):
        open_store("s3://without-obstore/cache").list()
