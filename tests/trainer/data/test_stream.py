"""Samples in the keyed order: for any number of ranks, workers and passes, from any position, loaded ahead."""

import itertools
import math
import shutil
import time
import weakref
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from cache_store import open_cache
from cache_store.errors import ConfigError, StaleError
from cache_store.storage.store import STORES
from tests.faulty_store import CountingStore
from tests.make_cache import make_cache
from tests.trainer import runs  # noqa: F401  # which tells the fork server what to load
from trainer import LatentStream
from trainer.data.buckets import Places, SampleOrder
from trainer.data.order import Permutation, RankShare, epoch_key, lanes_of, permute
from trainer.data.prefetch import WindowReader

COUNT, BATCH = 21, 4
CHOSEN = np.array([20, 3, 5, 8, 13, 0, 1])
load = partial(DataLoader, batch_size=None)

# torch warns of more workers than cores, which tests here use on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_a_stream_opens_no_samples_table_and_no_record(tmp_path, monkeypatch):
    """Also of a cache with rejected rows, whose numbers one file holds; nor do workers, which open it again."""
    latents, opened = np.random.default_rng(0).standard_normal((40, 2, 1, 1), np.float32), Counter[str]()
    cache = make_cache(tmp_path / "cache", latents, rejected=[3, 17, 30])
    expected = [batch["latents"] for batch in LatentStream(cache, BATCH, seed=0)]
    monkeypatch.setitem(STORES, "counting", lambda path: CountingStore(Path(path), opened))
    LatentStream(f"counting://{cache}", BATCH, seed=0)
    assert opened == dict.fromkeys(("zarr.json", "seal.json", "shards.bin", "rejected.parquet"), 1)
    for folder in ("samples", "commits"):
        shutil.rmtree(cache / folder)
    read = [batch["latents"] for batch in load(LatentStream(cache, BATCH, seed=0), num_workers=2)]
    assert all(map(torch.equal, read, expected))


def save_cache(path: Path, count: int = COUNT) -> Path:
    """Write a cache of `count` samples and two rejected rows."""
    latents = np.random.default_rng(0).standard_normal((count + 2, 4, 3, 3), np.float32)
    return make_cache(path, latents, rejected=[2, 9])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cache(tmp_path_factory.mktemp("one") / "cache")


def resume(cache: Path, state: dict[str, Any], **options: Any) -> LatentStream:
    stream = LatentStream(cache, **{"batch_size": BATCH, **options})
    stream.load_state_dict(state)
    return stream


def numbers_of(batches: Any) -> list[list[int]]:
    return [batch["numbers"].tolist() for batch in batches]


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 257, 65_537])
@pytest.mark.parametrize(("block", "batch_size"), [(1, 4), (2, 1), (32, 256)])
def test_every_sample_is_shown_once_an_epoch_also_in_blocks(count, block, batch_size):
    order = Permutation("cache", 0, count, block=block, lanes=lanes_of(batch_size))
    epochs = order.at(np.arange(3 * count)).reshape(3, count)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(count), (3, 1)))
    bounds = [order.window(0)]
    while bounds[-1][1] < 3 * count:
        bounds.append(order.window(bounds[-1][1]))
    assert [first for first, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert {count, 2 * count, 3 * count} <= {end for _, end in bounds}


def test_a_stream_in_blocks_reads_each_sample_once_and_ahead(tmp_path):
    """Windows hold 512 samples; the epoch's end cuts the second. A pass is whole batches."""
    cache = open_cache(save_cache(tmp_path / "cache", count=700))
    asked: list[int] = []
    read = cache.read
    cache.read = lambda numbers, **_: (asked.append(len(numbers)), read(numbers))[1]  # type: ignore[assignment]
    batches = list(LatentStream(cache, BATCH, epochs=2, shuffle_block=4))
    assert sorted(asked) == [188, 188, 512, 512], "two threads read, in either order"
    seen = np.concatenate(numbers_of(batches))
    assert sorted(seen[:700]) == sorted(seen[700:]) == list(range(700))
    for batch in batches:
        np.testing.assert_array_equal(batch["latents"].numpy(), read(batch["numbers"].numpy()))


def test_windows_are_released_once_they_were_shown():
    """Three are held, the current one and two ahead; a fourth after a start in the middle of a window."""
    order = SampleOrder("cache", 0, (1_000,), 8, block=4)
    held: list[weakref.ref[np.ndarray]] = []

    def read(places: Places) -> dict[str, np.ndarray]:
        samples = order.indices(places)
        held.append(weakref.ref(samples))
        return {"world": samples}

    for start, most in ((0, 3), (80, 4)):
        with closing(WindowReader(order, RankShare(8, 0, 1), read, 6_000)) as windows:
            for positions in np.arange(start, 6_000).reshape(-1, 8):
                assert (windows(positions)["world"] == order.at(positions)).all()
                assert sum(each() is not None for each in held) <= most


def test_epoch_seed_and_cache_decide_the_order_in_every_version():
    """16 is a power of four, which fills its domain."""
    keys = [epoch_key("cache", 0, 0), epoch_key("cache", 0, 1), epoch_key("cache", 1, 0), epoch_key("other", 0, 0)]
    for one, other in itertools.combinations([permute(np.arange(1_000), 1_000, key) for key in keys], 2):
        assert (one == other).mean() < 0.01
    assert permute(np.arange(8), 8, keys[0]).tolist() == [1, 5, 7, 6, 0, 3, 2, 4]
    assert permute(np.arange(16), 16, keys[0]).tolist() == [10, 14, 7, 6, 0, 3, 2, 4, 12, 9, 1, 15, 13, 8, 5, 11]
    later = Permutation("cache", 7, 595_000).at(3 * 595_000 + np.array([0, 1, 594_999]))
    assert later.tolist() == [529365, 12586, 475385]


@pytest.mark.parametrize("samples", [None, CHOSEN], ids=["all", "chosen"])
@pytest.mark.parametrize("shuffle_block", [1, 2])
def test_a_stream_shows_its_samples_in_the_keyed_order(cache, shuffle_block, samples):
    """Others are another stream's."""
    stream, numbers = LatentStream(cache, BATCH, samples=samples, epochs=4, shuffle_block=shuffle_block), samples
    numbers = np.arange(COUNT) if samples is None else samples
    order = Permutation(open_cache(cache).identity, 0, len(numbers), block=shuffle_block, lanes=lanes_of(BATCH))
    expected = numbers[order.at(np.arange(4 * len(numbers)))]
    assert np.concatenate(numbers_of(stream)).tolist() == expected.tolist()
    with pytest.raises(StaleError, match=r"samples +(all|7, sha256 \w+) "):
        LatentStream(cache, BATCH, samples=CHOSEN[::-1]).load_state_dict(stream.state_dict())


LOADERS = [
    {},
    {"num_workers": 3},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "multiprocessing_context": "forkserver"},
]


@pytest.mark.parametrize("options", LOADERS, ids=str)
def test_passes_go_on_through_the_epochs_also_after_a_resume(cache, options):
    whole = numbers_of(LatentStream(cache, BATCH, epochs=3))
    loader = load(LatentStream(cache, BATCH), **options)
    assert [numbers_of(loader) for _ in range(3)] == [whole[:6], whole[6:11], whole[11:]]
    loader = load(resume(cache, {"cursor": 8 * BATCH}), **options)
    assert [numbers_of(loader), numbers_of(loader)] == [whole[8:11], whole[11:]]
    loader = load(resume(cache, {"cursor": 6 * BATCH}), **options)  # where a pass ended, nothing of it is left
    assert [numbers_of(loader), numbers_of(loader)] == [[], whole[6:11]]


def begin_last(worker: int) -> None:
    """Start the second worker once the first has ended the pass and written so to shared memory."""
    while worker == 1 and get_worker_info().dataset._passes_2W[0, 0] == 0:
        time.sleep(0.01)


def test_a_worker_that_begins_after_the_pass_skips_nothing(cache):
    loader = load(LatentStream(cache, BATCH), num_workers=2, prefetch_factor=8, worker_init_fn=begin_last)
    assert numbers_of(loader) == numbers_of(LatentStream(cache, BATCH))


def test_a_state_is_enough_to_go_on_after_its_batch(cache):
    stream = LatentStream(cache, BATCH, epochs=3)
    batches = [{**batch, "state": stream.state_dict()} for batch in stream]
    whole = numbers_of(batches)
    for consumed, batch in enumerate(batches, 1):
        assert numbers_of(resume(cache, batch["state"], epochs=3)) == whole[consumed:]
    stream = resume(cache, {"cursor": batches[4]["cursor"]}, epochs=3)
    next(iter(stream))  # a pass that is left begins again where it began
    assert numbers_of(load(stream, num_workers=2)) == whole[5:]


def test_a_state_of_other_batches_is_refused(cache):
    stream = LatentStream(cache, BATCH)
    others = (("seed", 1, 0), ("batch_size", 2, 4), ("cache", "ab", ""), ("shuffle_block", 4, 1))
    for field, before, now in (*others, ("caption_dropout", 0.1, 0.0), ("normalize", True, False)):
        with pytest.raises(StaleError, match=rf"{field} +{before} +{now}"):
            stream.load_state_dict({**stream.state_dict(), field: before})


UNUSABLE = {
    "cursor": [{"state": state} for state in ({}, {"cursor": -4}, {"cursor": 3})],
    "epochs": [{"epochs": epochs} for epochs in (0, math.nan, "1")],
    "seed": [{"seed": seed} for seed in ("a", -1)],
    "shuffle_block": [{"shuffle_block": block} for block in (0, 2.5)],
    "posterior": [{"draw": True}],
    "samples": [{"samples": []}],
    "rank": [{"world_size": 3}, {"rank": 2, "world_size": 2}, {"rank": "0"}],
    "batch_size must be": [{"batch_size": size} for size in ("4", 0)],
}


def test_a_stream_without_a_position_a_pass_or_a_part_is_refused(cache):
    for name, every in UNUSABLE.items():
        for options in every:
            with pytest.raises(ConfigError, match=name):
                resume(cache, options.pop("state", {"cursor": 0}), **options)
    with pytest.raises(IndexError, match="21"):
        LatentStream(cache, BATCH, samples=np.array([3, 21]))
    with pytest.raises(ConfigError, match="2 workers"):
        list(load(LatentStream(cache, BATCH, shuffle_block=4), num_workers=2))
