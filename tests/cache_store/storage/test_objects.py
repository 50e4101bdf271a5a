"""An `ObjectStore` and a real server: requests, drafts, error messages, forked processes, and copies of a cache."""

import errno
import itertools
import multiprocessing
import sys

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cache.survey import survey_records
from cache_store.cli import main as cache_store
from cache_store.errors import CacheError, ConfigError
from cache_store.storage.object_errors import explain
from cache_store.storage.store import open_store
from cache_store.verify.verify import clear_leftovers, verify
from tests.make_cache import make_cache
from tests.named import assert_names
from tests.object_stores.server import EVERY_STORE
from tests.places import Objects


@pytest.fixture
def store(bucket):
    return open_store(f"{bucket}/a/cache")


@EVERY_STORE
def test_a_file_is_one_request_and_drafts_leave_nothing(store, proxy, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store.put_whole("zarr.json", b"spec")
    with store.draft("latents/c/0/0/0/0") as draft:
        draft.stream.write(b"samples")
        draft.finish()
        assert not [*tmp_path.iterdir()] or sys.platform != "linux", "its scratch has no name, and goes with a kill"
        draft.publish()
    assert bytes(store.map("latents/c/0/0/0/0")) == b"samples"
    proxy.mend()
    assert store.read("zarr.json") == b"spec"
    assert len(proxy.requests) == 1


@EVERY_STORE
def test_large_files_are_put_in_parts_also_by_a_busy_store(store, proxy, impatient, monkeypatch):
    monkeypatch.setattr("cache_store.storage.objects.MULTIPART_BYTES", 6 << 20)
    monkeypatch.setattr("cache_store.storage.objects.COPIED_BYTES", 5 << 20)
    data = np.random.default_rng(0).bytes(11 << 20)
    proxy.fail("503", "PUT", "large?", times=4)
    with store.draft("large") as draft:
        draft.stream.write(data)
        draft.finish()
        draft.publish()
    with store.open("large") as stream:
        assert stream.read() == data


S3_ERROR = "Generic S3 error: status code: {} Some Words: <Error><Code>{}</Code></Error>"
NO_DELETION = "Generic MicrosoftAzure error: Bulk delete request failed for key cache/seal.json: This request is not "
NO_DELETION += "authorized to perform this operation. (code: 403)"
"""Azure's answer to a SAS token without the right to delete: one for all deletions."""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (S3_ERROR.format(400, "ExpiredToken"), "expired AWS_SESSION_TOKEN"),
        (S3_ERROR.format(403, "InvalidAccessKeyId"), "credentials AWS_ACCESS_KEY_ID"),
        (S3_ERROR.format(301, "PermanentRedirect"), "region"),
        (S3_ERROR.format(501, "NotImplemented"), "501 conditional cache-store copy"),
        (NO_DELETION, "credentials (403): AWS_"),
    ],
)
def test_an_error_of_a_store_is_one_line_with_what_to_check(answer, said):
    from obstore.exceptions import GenericError

    error = GenericError(f"{answer}\nDebug source:")
    explained = explain(error, "s3://bucket/cache/seal.json")
    assert_names(explained, said)
    assert explained.filename == "s3://bucket/cache/seal.json"
    assert "\n" not in str(explained)
    assert explained.errno != errno.ENOENT  # which would say that there is no such file


def test_what_no_store_takes_in_one_request_is_refused_before_it_is_sent(store, proxy, monkeypatch):
    monkeypatch.setattr("cache_store.storage.objects.MOST_CREATED_BYTES", 3)
    assert store.put_if_absent("small", b"abc")
    before = len(proxy.requests)
    with pytest.raises(OSError, match="4 bytes.*samples_per_shard"):
        store.put_if_absent("large", b"abcd")
    assert len(proxy.requests) == before


@EVERY_STORE
def test_a_shard_that_lost_what_it_had_is_no_cut_answer(copied, server, tmp_path):
    """It is deleted, emptied, or cut in its third sample; also with kept blocks."""
    objects, shard = Objects(copied[1], server.endpoint), "latents/40x48/c/1/0/0/0"
    data = objects.read(shard)
    for length, names in ((None, ""), (0, f"0 {len(data)}"), (700, f"700 {len(data)}")):
        there = [open_cache(copied[1]), open_cache(copied[1], cache_dir=tmp_path / "kept")]
        objects.lose(shard) if length is None else objects.put(shard, data[:length])
        for cache, numbers in itertools.product(there, ([*range(27)], [9], [13])):
            with pytest.raises(CacheError) as caught:
                cache.read(numbers)
            assert_names(caught.value, f"{copied[1]}/{shard} {names} verify {copied[1]}")


def test_a_forked_process_is_told_to_be_spawned(copied):
    store, fork = open_cache(copied[1]).store, multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()

    def read() -> None:
        try:
            store.read("seal.json")
        except ConfigError as error:
            queue.put(str(error))

    process = fork.Process(target=read)
    process.start()
    process.join()
    assert_names(queue.get(), f'{copied[1]} multiprocessing_context="spawn"')


SHARDS = 40


def test_what_looks_at_all_shards_asks_once_for_each_record(bucket, proxy, tmp_path, capsys):
    latents = np.zeros((SHARDS, 4, 2, 2), np.float32)
    cache = make_cache(tmp_path / "cache", latents, rejected=[*range(0, SHARDS, 2)], samples_per_shard=2)
    url, shards = f"{bucket}/many", SHARDS // 2

    def requests(action) -> int:
        proxy.mend()
        action()
        return len(proxy.requests)

    looks = {
        "survey": lambda: survey_records(url),
        "verify": lambda: verify(url),
        "info": lambda: cache_store(["info", url]),
        "leftovers": lambda: clear_leftovers(open_store(url), survey_records(url).spec.value),
    }
    assert requests(lambda: cache_store(["copy", str(cache), url])) <= 12 * shards + 20
    assert {name: count for name, look in looks.items() if (count := requests(look)) > shards + 20} == {}
    opened = open_cache(url)
    assert requests(opened.rejected_rows) == 1
    assert np.array_equal(opened.rejected_rows(), np.arange(0, SHARDS, 2))
    assert requests(lambda: open_cache(url)) <= 6
