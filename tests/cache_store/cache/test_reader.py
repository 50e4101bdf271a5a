import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cache_store import CacheError, open_cache
from cache_store.cache import reader, sealed_shards
from cache_store.cache.gather import WAYS, FastestCopy, move_rows
from cache_store.errors import NoCacheError, StaleError
from cache_store.format.schema import SEAL_FILE, commit_file, samples_file
from tests.cache_store.conftest import CACHED_ROWS, REJECTED, flip, shard_name
from tests.make_cache import make_cache


def test_numbers_are_dense_over_cached_rows_and_in_the_order_asked(cache, latents):
    opened = open_cache(cache)
    assert len(opened) == len(CACHED_ROWS)
    numbers = np.array([26, 0, 5, 5, 13])
    np.testing.assert_array_equal(opened.read(numbers), latents[np.array(CACHED_ROWS)[numbers]].astype(np.float16))
    assert opened.samples(numbers, ["row"])["row"].to_pylist() == [CACHED_ROWS[number] for number in numbers]


def test_a_sample_knows_its_id_text_and_source_and_none_are_empty(cache):
    opened, none = open_cache(cache), np.array([], np.int64)
    sample = opened.samples(np.array([0])).to_pylist()[0]
    assert (sample["id"], sample["uri"]) == ("sample-000000", "sample-000000.png")
    assert sample["conversations"][1] == {"from": "gpt", "value": "this is sample-000000"}
    assert opened.read(none).shape == (0, 4, 6, 5)
    assert opened.samples(none, ["id"]).num_rows == 0


def test_a_buffer_is_reused(cache):
    out = np.empty((2, 4, 6, 5), np.float16)
    assert open_cache(cache).read(np.array([1, 2]), out=out) is out
    np.testing.assert_array_equal(out, open_cache(cache).read(np.array([1, 2])))


@pytest.mark.parametrize(
    "out",
    [
        np.empty((2, 4, 6, 5), np.float32),
        np.empty((3, 4, 6, 5), np.float16),
        np.empty((5, 6, 4, 2), np.float16).T,
        np.broadcast_to(np.float16(7), (2, 4, 6, 5)),
        np.frombuffer(bytes(480), np.float16).reshape(2, 4, 6, 5),
    ],
    ids=["another dtype", "another shape", "another order", "one value", "read-only"],
)
@pytest.mark.parametrize("copy", [*WAYS, move_rows])
def test_a_buffer_that_does_not_fit_is_refused_unwritten(cache, out, copy, monkeypatch):
    monkeypatch.setattr(reader, "FASTEST", FastestCopy([copy]))
    before = out.copy()
    with pytest.raises(ValueError, match="out must be"):
        open_cache(cache).read(np.array([1, 2]), out=out)
    np.testing.assert_array_equal(out, before)


@pytest.mark.parametrize("number", [-1, 27, 10**12])
def test_numbers_outside_the_cache_are_refused(cache, number):
    with pytest.raises(IndexError, match=r"\[0, 27\)"):
        open_cache(cache).read(np.array([number]))


def test_a_flipped_bit_is_never_read_and_names_shard_and_row(tmp_path, latents, form):
    store_format, codec = form
    path = make_cache(tmp_path / "cache", latents, rejected=REJECTED, store_format=store_format, codec=codec)
    location, name = open_cache(path).samples(np.array([10])).to_pylist()[0], shard_name(path, 1)
    flip(path / name, location["offset"] + location["length"] // 2)
    opened = open_cache(path)
    with pytest.raises(CacheError, match=re.escape(f"row {location['row']} in shard 1 ({name}) does not match")):
        opened.read(np.array([10]))
    if codec == "none":
        assert opened.read(np.array([10]), check=False).shape == (1, 4, 6, 5), "unchecked, it is read as it lies"
    (path / samples_file(1)).unlink()
    with pytest.raises(CacheError, match=re.escape(f"sample 10 in shard 1 ({name}) does not match")):
        opened.read(np.array([10]))


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("SHARD", None, "SHARD cannot be read"),
        ("SHARD", 700, "SHARD is shorter"),
        ("SHARD", 0, "SHARD is shorter"),
        ("commits/000001.json", None, "shard 1 is not as sealed"),
    ],
)
def test_a_shard_whose_file_or_record_is_lost_or_cut_is_not_read(cache, name, size, message):
    opened, path = open_cache(cache), cache / name.replace("SHARD", shard_name(cache, 1))
    path.unlink() if size is None else os.truncate(path, size)
    opened.read(np.array([0]))
    with pytest.raises(CacheError, match=message.replace("SHARD", shard_name(cache, 1))):
        opened.read(np.arange(27))


@pytest.mark.parametrize("samples", ["another shard's", "cut", "gone"])
def test_a_samples_table_that_is_not_the_sealed_one_is_never_read(cache, samples):
    """Its places would pass for this shard's, and its texts for those of other images."""
    path = cache / samples_file(1)
    path.write_bytes((cache / samples_file(2)).read_bytes() if samples == "another shard's" else path.read_bytes()[:-1])
    if samples == "gone":
        path.unlink()
    for use in (open_cache(cache).read, open_cache(cache).samples):
        use(np.array([0]))
        with pytest.raises(CacheError, match=r"samples/000001.parquet (is not as sealed|cannot be read)"):
            use(np.array([10]))


def test_an_unsealed_cache_says_how_far_its_build_has_come(tmp_path, latents):
    path = make_cache(tmp_path / "cache", latents, seal=False)
    (path / commit_file(1)).unlink()
    with pytest.raises(StaleError, match=r"(?s)not sealed: its `precompute build`.*committed shards +3 +4 needed"):
        open_cache(path)


def test_a_folder_without_a_cache_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(NoCacheError, match=f"{path} holds no cache"):
            open_cache(path)


def test_a_lost_spec_and_an_edited_seal_are_damage(cache):
    seal = cache / SEAL_FILE
    seal.write_bytes(seal.read_bytes().replace(b'"rejected":3', b'"rejected":2'))
    with pytest.raises(CacheError, match="edited or damaged"):
        open_cache(cache)
    (cache / "zarr.json").unlink()
    with pytest.raises(CacheError, match=r"zarr\.json is missing; rerun `precompute build`") as caught:
        open_cache(cache)
    assert caught.value.exit_code == 1


def test_a_cache_put_in_the_place_of_an_open_one_is_not_mixed_in(cache, latents, store_format, tmp_path):
    opened = open_cache(cache)
    opened.read(np.array([0]))
    opened.samples(np.array([0]))
    other = make_cache(tmp_path / "other", latents + 1, rejected=REJECTED, store_format=store_format)
    cache.rename(tmp_path / "moved")
    other.rename(cache)
    for read in (opened.read, opened.samples):
        read(np.array([0]))  # of the cache that was opened, whose files are mapped
        with pytest.raises(CacheError, match="shard 3 is not as sealed: the cache was replaced.*cache-store verify"):
            read(np.array([0, 26]))


@pytest.mark.parametrize("copied_at_once", [0, 1, 5, 27])
def test_every_sample_is_checked_however_few_are_copied_at_once(cache, copied_at_once, monkeypatch):
    monkeypatch.setattr(reader, "COPIED_BYTES", copied_at_once * 240 + 239)
    offsets = open_cache(cache).samples(np.arange(27), ["offset"])["offset"].to_pylist()
    for row, offset in zip(CACHED_ROWS, offsets, strict=True):
        file = cache / shard_name(cache, row // 8)
        flip(file, offset)
        with pytest.raises(CacheError, match=rf"row {row} in shard {row // 8} .* does not match its crc32c"):
            open_cache(cache).read(np.arange(27))
        flip(file, offset)
    open_cache(cache).read(np.arange(27))


@pytest.mark.parametrize("open_shards", [sealed_shards.MAPPED_SHARDS, 1], ids=["all open", "one open at a time"])
def test_threads_and_processes_share_a_cache(cache, latents, open_shards, monkeypatch):
    monkeypatch.setattr(sealed_shards, "MAPPED_SHARDS", open_shards)
    opened = pickle.loads(pickle.dumps(open_cache(cache)))  # noqa: S301 (what multiprocessing does)
    with ThreadPoolExecutor(4) as threads:
        read = [*threads.map(opened.read, [np.arange(27)] * 80)]
    np.testing.assert_array_equal(read, [latents[CACHED_ROWS].astype(np.float16)] * 80)
