"""Reading a cache, or several of one plan; damage is never read, and incomplete caches are refused."""

import itertools
import os
import pickle
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_store import CacheError, open_cache, open_joined
from cache_store.cache import reader, sealed_shards
from cache_store.cache.gather import copy_rows, move_rows
from cache_store.cache.metadata import read_seal
from cache_store.errors import ConfigError, NoCacheError, StaleError
from tests.cache_store.conftest import CACHED_ROWS, REJECTED, contents, flip, samples_of, shard_name
from tests.make_cache import caption, make_cache, text_recipe
from tests.memory_store import MemoryStore

ALL = np.arange(len(CACHED_ROWS))


def test_samples_come_by_dense_numbers_in_the_order_asked(cache, latents):
    opened = open_cache(cache)
    assert len(opened) == len(CACHED_ROWS)
    numbers = np.array([26, 0, 5, 5, 13])
    rows = [CACHED_ROWS[number] for number in numbers]
    np.testing.assert_array_equal(opened.read(numbers), latents[rows].astype(np.float16))
    for sample, row in zip(opened.samples(numbers).to_pylist(), rows, strict=True):
        name = f"sample-{row:06d}"
        assert (sample["row"], sample["id"], sample["uri"]) == (row, name, f"{name}.png")
        assert sample["conversations"] == caption(f"this is {name}")
    none = np.array([], np.int64)
    assert (opened.read(none).shape, opened.samples(none, ["id"]).num_rows) == ((0, 4, 6, 5), 0)
    for number in (-1, 27, 10**12):
        with pytest.raises(IndexError, match=r"\[0, 27\)"):
            opened.read(np.array([number]))


def test_what_is_kept_of_caches_is_bounded_and_on_this_machine(cache):
    for option, values in {
        "cache_bytes": (10, -1, "x", None, float("nan")),
        "cache_dir": ("s3://bucket/kept", Path("gs://bucket/kept")),
    }.items():
        for value in values:
            with pytest.raises(ConfigError, match=f"^{option}"):
                open_cache(cache, **{option: value})


def test_tables_are_read_in_the_calling_thread(cache):
    """A thread of Arrow's that frees our buffer while the interpreter exits would abort the program."""
    code = "from os import listdir; from cache_store import open_cache; threads = lambda: listdir('/proc/self/task');"
    code += f"cache, before = open_cache({str(cache)!r}), threads(); cache.samples([0]); assert threads() == before"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


WRONG_BUFFERS = [
    np.empty((2, 4, 6, 5), np.float32),
    np.empty((3, 4, 6, 5), np.float16),
    np.empty((5, 6, 4, 2), np.float16).T,
    np.broadcast_to(np.float16(7), (2, 4, 6, 5)),
    np.frombuffer(bytes(480), np.float16).reshape(2, 4, 6, 5),  # read-only
]


@pytest.mark.parametrize("copy", [copy_rows, move_rows])
def test_a_buffer_is_filled_or_refused(cache, latents, copy, monkeypatch):
    """By the function in C, and by the one used without a compiler."""
    monkeypatch.setattr(reader, "copy_rows", copy)
    opened, numbers = open_cache(cache), np.random.default_rng(1).permutation(len(CACHED_ROWS))
    out = np.empty((len(numbers), 4, 6, 5), np.float16)
    assert opened.read(numbers, out=out) is out
    np.testing.assert_array_equal(out, latents[CACHED_ROWS][numbers].astype(np.float16))
    for wrong in WRONG_BUFFERS:
        before = wrong.copy()
        with pytest.raises(ValueError, match="out must be"):
            opened.read(np.array([1, 2]), out=wrong)
        np.testing.assert_array_equal(wrong, before)


@pytest.mark.parametrize("open_shards", [sealed_shards.MAPPED_SHARDS, 1], ids=["all open", "one open at a time"])
def test_threads_and_processes_share_a_cache(cache, latents, open_shards, monkeypatch):
    monkeypatch.setattr(sealed_shards, "MAPPED_SHARDS", open_shards)
    opened = pickle.loads(pickle.dumps(open_cache(cache)))  # noqa: S301 (what multiprocessing does)
    with ThreadPoolExecutor(4) as threads:
        read = [*threads.map(opened.read, [ALL] * 80)]
    np.testing.assert_array_equal(read, [latents[CACHED_ROWS].astype(np.float16)] * 80)


# Damage is never read.


@pytest.mark.parametrize("copied_at_once", [0, 1, 5, 27])
def test_a_flipped_bit_is_never_read_and_names_its_row(tmp_path, latents, form, copied_at_once, monkeypatch):
    """Also if only a few samples are copied at a time."""
    monkeypatch.setattr(reader, "READ_BYTES", copied_at_once * 240 + 239)
    store_format, codec = form
    path = make_cache(tmp_path / "cache", latents, rejected=REJECTED, store_format=store_format, codec=codec)
    offsets = open_cache(path).samples(ALL, ["offset"])["offset"].to_pylist()
    for row, offset in zip(CACHED_ROWS, offsets, strict=True):
        name = shard_name(path, row // 8)
        flip(path / name, offset + 100)
        is_first = row % 8 == 0  # by it, a shard is known
        place = f"{name} is damaged" if is_first else f"row {row} in shard {row // 8} ({name})"
        opened = open_cache(path)
        with pytest.raises(CacheError, match=re.escape(place)):
            opened.read(ALL)
        if codec == "none" and not is_first:
            assert opened.read(ALL, check=False).shape == (27, 4, 6, 5), "unchecked, it is read as it lies"
        flip(path / name, offset + 100)
    opened.read(ALL)
    flip(path / name, offset + 100)
    (path / "samples/000003.parquet").unlink()
    with pytest.raises(CacheError, match=re.escape(f"sample 26 in shard 3 ({name})")):
        opened.read(ALL)


@pytest.mark.parametrize("kind", ["images", "uint8", "texts"])
def test_shards_swapped_under_an_open_reader_are_refused_also_unchecked(tmp_path, latents, form, kind):
    """They are of one size, and no row is rejected. A mapped shard is read as it was."""
    store_format, codec = form
    settings: dict[str, Any] = {"store_format": store_format, "codec": codec}
    if kind != "images" and store_format == "webdataset":
        pytest.skip("tars hold no uint8, and texts are samples as others are")
    settings |= {"uint8": {"dtype": "uint8"}, "texts": {"text": text_recipe(5)}}.get(kind, {})
    samples = samples_of((5, 8), 30, seed=9) if kind == "texts" else latents
    path = make_cache(tmp_path / "cache", samples, **settings)
    other = make_cache(tmp_path / "other", samples[::-1], **settings)
    opened = open_cache(path)
    before = opened.read(np.array([20]))
    names = [shard_name(path, shard) for shard in range(3)]
    for name, source in zip(names, (path / names[1], path / names[0], other / names[2]), strict=True):
        shutil.copy(source, tmp_path / name.replace("/", "-"))
    for name in names:
        (tmp_path / name.replace("/", "-")).rename(path / name)
    for cache, number, check in itertools.product((opened, open_cache(path)), (0, 9, 20), (True, False)):
        if (cache, number) == (opened, 20):
            np.testing.assert_array_equal(cache.read(np.array([number]), check=check), before)
        else:
            with pytest.raises(CacheError, match=f"{names[number // 8]}.*`cache-store verify"):
                cache.read(np.array([number]), check=check)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_shard_of_images_in_zarr_is_all_that_finds_and_checks_its_samples(tmp_path, latents, codec):
    """Without samples tables and records; in a folder, and from a store, where a shard is known when first fetched."""
    path = make_cache(tmp_path / "cache", latents, rejected=REJECTED, codec=codec)
    for folder in ("samples", "commits"):
        shutil.rmtree(path / folder)
    store = MemoryStore(contents(path))
    store.writes.update(dict.fromkeys(store.files, 1))
    expected, remote = latents[CACHED_ROWS].astype(np.float16), open_cache(store)
    for cache in (open_cache(path), open_cache(store)):
        np.testing.assert_array_equal(cache.read(ALL), expected)
    np.testing.assert_array_equal(remote.read(np.array([0])), expected[:1])
    first, second = (shard_name(path, shard) for shard in (1, 2))
    store.files[first], store.files[second] = store.files[second], store.files[first]
    store.put_whole(shard_name(path, 0), store.files[shard_name(path, 0)])  # after it was read
    for number, check in itertools.product((0, 8, 16), (True, False)):
        with pytest.raises(CacheError, match="`cache-store verify"):
            remote.read(np.array([number]), check=check)


TABLE = "samples/000001.parquet"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("SHARD", content) for content in (None, 700, 0)),
        ("commits/000001.json", None),
        *((TABLE, content) for content in (None, 3_000, "samples/000002.parquet")),
    ],
)
def test_a_shard_with_a_lost_cut_or_other_file_is_not_read(cache, store_format, name, content):
    """Otherwise another shard's table would give wrong texts, and of tars wrong places."""
    opened, path = open_cache(cache), cache / name.replace("SHARD", shard_name(cache, 1))
    if isinstance(content, str):
        shutil.copy(cache / content, path)
    else:
        path.unlink() if content is None else os.truncate(path, content)
    reads = [opened.samples] if name != "SHARD" else []
    for use in (*reads, *([opened.read] if store_format == "webdataset" or not reads else [])):
        use(np.array([0]))
        with pytest.raises(CacheError, match="shard 1" if name.startswith("commits") else path.name):
            use(ALL)


def test_no_cache_an_unsealed_and_a_damaged_one_are_refused(cache, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(NoCacheError, match=str(path)):
            open_cache(path)
    seal = (cache / "seal.json").read_bytes()
    (cache / "seal.json").write_bytes(seal.replace(b'"rejected":3', b'"rejected":2'))
    with pytest.raises(CacheError, match=r"seal\.json"):
        open_cache(cache)
    (cache / "seal.json").unlink()
    with pytest.raises(CacheError, match="`cache-store copy`.*`precompute seal`"):
        read_seal(cache)
    (cache / "commits/000001.json").unlink()
    with pytest.raises(StaleError, match=r"(?s)shards +3 +4.*`precompute seal`"):
        open_cache(cache)
    (cache / "zarr.json").unlink()
    with pytest.raises(CacheError, match=r"zarr\.json .*`precompute build`") as caught:
        open_cache(cache)
    assert caught.value.exit_code == 1


# Several caches of one plan, joined by row.

ROWS = 27
REJECTS = {"world": (0, 4, 13, 26), "tower": (4, 5, 14)}
JOINED_ROWS = [row for row in range(ROWS) if row not in {*REJECTS["world"], *REJECTS["tower"]}]
SAMPLES = {"world": samples_of((4, 6, 5), ROWS, seed=1), "tower": samples_of((3, 8), ROWS, seed=2)}


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> dict[str, Path]:
    """Two caches of one plan with different shapes, shard sizes, formats and rejects."""
    folder, options = tmp_path_factory.mktemp("joined"), {"samples_per_shard": 5, "store_format": "webdataset"}
    return {
        "world": make_cache(folder / "world", SAMPLES["world"], rejected=REJECTS["world"]),
        "tower": make_cache(folder / "tower", SAMPLES["tower"], rejected=REJECTS["tower"], **options),
    }


def test_joined_caches_give_the_rows_cached_in_all(caches):
    joined = pickle.loads(pickle.dumps(open_joined(caches)))  # noqa: S301 (our own, as a DataLoader's worker gets it)
    assert len(joined) == len(JOINED_ROWS)
    numbers = np.array([7, 0, 7, *range(len(joined))])
    rows = [JOINED_ROWS[number] for number in numbers]
    assert joined.rows(numbers).tolist() == rows
    for name, samples in joined.read(numbers).items():
        np.testing.assert_array_equal(samples, SAMPLES[name][rows].astype(np.float16))
    assert joined.samples(numbers, ["row", "id"]).to_pylist() == [{"row": r, "id": f"sample-{r:06d}"} for r in rows]
    assert open_joined({"b": caches["tower"], "a": caches["world"]}).identity == joined.identity, "whatever their names"
    assert open_joined({"world": caches["world"]}).identity == open_cache(caches["world"]).identity != joined.identity
    for number in (-1, len(joined)):
        with pytest.raises(IndexError, match=rf"\[0, {len(joined)}\)"):
            joined.read(np.array([number]))


def test_a_column_comes_from_the_first_joined_cache_that_has_it(caches, tmp_path):
    """Whatever the order, a size comes from a cache of images; the row of all is the plan's."""
    tokens = np.zeros((ROWS, 6, 8), np.float32)
    text = make_cache(tmp_path / "text", tokens, text=text_recipe(6), rejected=[JOINED_ROWS[1]])
    joined, numbers = open_joined({"text": text, **caches}), np.array([3, 0, 1])
    rows = [JOINED_ROWS[number] for number in (4, 0, 2)]
    found = joined.samples(numbers, ["width", "tokens", "row", "height"])
    assert found.column_names == ["width", "tokens", "row", "height"]
    assert found["row"].to_pylist() == rows
    world, text_only = open_joined({"world": caches["world"]}), open_joined({"text": text})
    for alone, column in ((world, "width"), (world, "height"), (text_only, "tokens")):
        places = [alone.rows(np.arange(len(alone))).tolist().index(row) for row in rows]
        assert found[column].to_pylist() == alone.samples(np.array(places), [column])[column].to_pylist()
    assert joined.samples(np.array([], np.int64), ["width", "id"]).num_rows == 0
    with pytest.raises(ConfigError, match="size; columns are row, id, "):
        joined.samples(numbers, ["size"])


def test_nothing_to_join_no_cache_and_other_plans_are_refused(caches, tmp_path):
    for wrong in ({}, [*caches.values()]):
        with pytest.raises(ConfigError):
            open_joined(wrong)
    with pytest.raises(NoCacheError):
        open_joined({**caches, "absent": tmp_path / "absent"})
    other = make_cache(tmp_path / "other", SAMPLES["tower"], [f"other-{row}" for row in range(ROWS)])
    with pytest.raises(StaleError, match=r"(?s)samples .*--source.kind cache"):
        open_joined({**caches, "other": other})
    with pytest.raises(StaleError, match=r"rows +27 +9"):
        open_joined({"world": caches["world"], "fewer": make_cache(tmp_path / "fewer", SAMPLES["tower"][:9])})


def test_captions_are_answers_and_none_without_one(tmp_path):
    """A sample of several captions shows the next one in each epoch; a joined cache counts its own samples."""
    several = [*caption("a"), {"from": "gpt", "value": "b"}, {"from": "gpt", "value": "c"}]
    given: list[list[dict[str, str]]] = [caption("one"), [], several]
    cache = open_cache(make_cache(tmp_path / "cache", np.zeros((3, 1, 2, 2), np.float32), conversations=given))
    numbers = np.array([2, 0, 1])
    assert cache.captions(numbers) == ["a", "one", None]
    epochs = [cache.captions(numbers, seed=0, epoch=epoch) for epoch in range(3)]
    assert {each[0] for each in epochs} == {*"abc"}
    assert {tuple(each[1:]) for each in epochs} == {("one", None)}
    starts = {tuple(cache.captions(np.array([2]), seed=seed)) for seed in range(20)}
    assert len(starts) == 3
