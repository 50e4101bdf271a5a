import copy
import time
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from cache_store import open_cache, open_joined
from cache_store.errors import ConfigError, StaleError
from tests.make_cache import make_cache
from tests.trainer import runs  # noqa: F401  # which tells the fork server what to load
from trainer import LatentStream

COUNT, BATCH = 21, 4


@pytest.fixture(scope="module", params=["float16", "bfloat16", "float32"])
def cache_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    latents = np.random.default_rng(0).standard_normal((COUNT + 2, 4, 3, 3), np.float32)
    path = tmp_path_factory.mktemp(request.param) / "cache"
    return make_cache(path, latents, rejected=[2, 9], dtype=request.param)


@pytest.fixture(scope="module")
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what has nothing to do with the dtype."""
    latents = np.random.default_rng(0).standard_normal((COUNT, 4, 3, 3), np.float32)
    return make_cache(tmp_path_factory.mktemp("one") / "cache", latents)


def numbers_of(batches: Any) -> list[list[int]]:
    return [batch["numbers"].tolist() for batch in batches]


def test_an_epoch_holds_each_sample_and_fills_its_last_batch(cache_path):
    seen = list(chain.from_iterable(numbers_of(LatentStream(cache_path, BATCH))))
    assert len(seen) == 24
    assert sorted(seen[:COUNT]) == list(range(COUNT))


def test_latents_are_the_stored_ones_bit_for_bit(cache_path):
    cache = open_cache(cache_path)
    for batch in LatentStream(cache, BATCH):
        stored = cache.read(batch["numbers"].numpy())
        assert batch["latents"].dtype == getattr(torch, stored.dtype.name)
        assert batch["latents"].float().numpy().tobytes() == stored.astype(np.float32).tobytes()


# More workers than cores is what this test is about, and what torch warns of.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_same_batches(cache_path, workers):
    stream = LatentStream(cache_path, BATCH, epochs=2)
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    for alone, loaded in zip(stream, loader, strict=True):
        assert alone["cursor"] == loaded["cursor"]
        assert torch.equal(alone["numbers"], loaded["numbers"])
        assert torch.equal(alone["latents"], loaded["latents"])


LOADERS = {
    "no workers": {},
    "2 workers": {"num_workers": 2},
    "3 workers": {"num_workers": 3},
    "kept workers": {"num_workers": 2, "persistent_workers": True},
    "workers that get a pickled copy": {"num_workers": 2, "multiprocessing_context": "forkserver"},
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_passes_go_on_through_the_epochs_also_after_a_resume(one_cache, options):
    """Without workers, and with workers that are made anew for each pass, or stay."""
    whole = numbers_of(LatentStream(one_cache, BATCH, epochs=3))
    loader = DataLoader(LatentStream(one_cache, BATCH), batch_size=None, **options)
    passes = [numbers_of(loader) for _ in range(3)]
    assert passes[0] + passes[1] + passes[2] == whole
    assert [len(each) for each in passes] == [6, 5, 5]
    resumed = LatentStream(one_cache, BATCH)
    loader = DataLoader(resumed, batch_size=None, **options)
    resumed.load_state_dict({"cursor": 8 * BATCH})
    assert [numbers_of(loader), numbers_of(loader)] == [whole[8:11], whole[11:16]]


def test_a_pass_that_is_left_begins_again_where_it_began(one_cache):
    stream = LatentStream(one_cache, BATCH)
    first = next(iter(stream))
    state = stream.state_dict()
    whole = numbers_of(stream)
    assert whole[0] == first["numbers"].tolist()
    stream.load_state_dict(state)
    assert numbers_of(stream) == whole[1:]


def test_passes_of_a_part_of_an_epoch_are_that_long_pass_cut_up(one_cache):
    stream = LatentStream(one_cache, BATCH, epochs=0.1)
    passes = [numbers_of(stream) for _ in range(30)]
    assert all(passes)
    batches = list(chain.from_iterable(passes))
    assert batches == numbers_of(LatentStream(one_cache, BATCH, epochs=9))[: len(batches)]


def test_a_pass_of_a_tenth_is_a_tenth_though_no_float_is(tmp_path):
    """Ten passes of a tenth of 40 samples are of 4 samples each, and one epoch."""
    cache = make_cache(tmp_path / "cache", np.random.default_rng(0).standard_normal((40, 4, 1, 1), np.float32))
    stream = LatentStream(cache, BATCH, epochs=0.1)
    passes = [numbers_of(stream) for _ in range(10)]
    assert [len(each) for each in passes] == [1] * 10
    assert list(chain.from_iterable(passes)) == numbers_of(LatentStream(cache, BATCH))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_passes_with_another_number_of_workers_each_go_on_too(one_cache):
    stream = LatentStream(one_cache, BATCH)
    loaders = [DataLoader(stream, batch_size=None, num_workers=workers) for workers in (0, 3, 1, 2)]
    passes = [numbers_of(loader) for loader in loaders]
    assert list(chain.from_iterable(passes)) == numbers_of(LatentStream(one_cache, BATCH, epochs=4))


def with_state(batch: dict[str, Any]) -> tuple[int, dict[str, Any], list[int]]:
    """In a worker: which one it is, its own state after the batch, and the batch."""
    worker = get_worker_info()
    return worker.id, worker.dataset.state_dict(), batch["numbers"].tolist()


@pytest.mark.parametrize(("consumed", "end"), [(4, 6), (5, 6), (6, 6), (10, 11), (11, 11)])
def test_workers_that_resume_alone_go_on_together(one_cache, consumed, end):
    """As loaders do that keep the state of each worker; workers that stay then give the next pass too."""
    whole = numbers_of(LatentStream(one_cache, BATCH, epochs=3))
    loader = DataLoader(LatentStream(one_cache, BATCH), batch_size=None, num_workers=2, collate_fn=with_state)
    taken = [*loader, *loader][:consumed]
    assert [numbers for _, _, numbers in taken] == whole[:consumed]
    states = {worker: state for worker, state, _ in taken}
    resumed = DataLoader(
        LatentStream(one_cache, BATCH),
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=lambda worker: get_worker_info().dataset.load_state_dict(states[worker]),
    )
    assert sorted(numbers_of(resumed)) == sorted(whole[consumed:end])
    assert numbers_of(resumed) == whole[end : end + 5]


def begin_last(worker: int) -> None:
    """The second worker begins once the first has ended the pass, and has said so in the memory they share."""
    while worker == 1 and get_worker_info().dataset._passes_2W[0, 0] == 0:
        time.sleep(0.01)


def test_a_worker_that_begins_after_the_pass_skips_nothing(one_cache):
    loader = DataLoader(
        LatentStream(one_cache, BATCH), batch_size=None, num_workers=2, prefetch_factor=8, worker_init_fn=begin_last
    )
    assert numbers_of(loader) == numbers_of(LatentStream(one_cache, BATCH))


def test_ranks_together_see_the_global_batches(cache_path):
    whole = numbers_of(LatentStream(cache_path, BATCH, epochs=2))
    halves = [numbers_of(LatentStream(cache_path, BATCH, epochs=2, rank=rank, world_size=2)) for rank in (0, 1)]
    assert whole == [left + right for left, right in zip(*halves, strict=True)]


def test_the_cursor_of_any_batch_is_enough_to_go_on_after_it(cache_path):
    stream = LatentStream(cache_path, BATCH, epochs=3)
    batches = list(stream)
    whole, cursors = numbers_of(batches), [batch["cursor"] for batch in batches]
    for consumed, cursor in enumerate(cursors, 1):
        resumed = LatentStream(cache_path, BATCH, epochs=3)
        resumed.load_state_dict({"cursor": cursor})
        assert numbers_of(resumed) == whole[consumed:]
    resumed.load_state_dict({"cursor": cursors[4]})
    assert numbers_of(DataLoader(resumed, batch_size=None, num_workers=2)) == whole[5:]


def test_the_state_counts_the_batch_in_hand_as_consumed(cache_path):
    stream = LatentStream(cache_path, BATCH)
    states = [copy.deepcopy(stream.state_dict()) for _ in stream]
    whole = numbers_of(LatentStream(cache_path, BATCH))
    resumed = LatentStream(cache_path, BATCH)
    resumed.load_state_dict(states[2])
    assert numbers_of(resumed) == whole[3:]


@pytest.mark.parametrize(("field", "before", "now"), [("seed", 1, 0), ("batch_size", 2, BATCH), ("cache", "ab", "")])
def test_a_state_of_another_seed_batch_or_cache_is_refused(one_cache, field, before, now):
    stream = LatentStream(one_cache, BATCH)
    with pytest.raises(StaleError, match=rf"{field} +{before} +{now}"):
        stream.load_state_dict({**stream.state_dict(), field: before})


def test_a_pass_without_end_goes_on_through_the_epochs(one_cache):
    endless = islice(LatentStream(one_cache, BATCH, epochs=None), 14)
    assert numbers_of(endless) == numbers_of(LatentStream(one_cache, BATCH, epochs=3))[:14]


@pytest.mark.parametrize("state", [{}, {"cursor": None}, {"cursor": "8"}, {"cursor": -4}, {"cursor": 3}])
def test_a_state_without_a_cursor_is_refused(one_cache, state):
    with pytest.raises(ConfigError, match=r"cursor .* is not a multiple"):
        LatentStream(one_cache, BATCH).load_state_dict(state)


@pytest.mark.parametrize("epochs", [0, -1, 1e300, float("nan"), float("inf")])
def test_a_pass_of_nothing_is_refused(one_cache, epochs):
    with pytest.raises(ConfigError, match="epochs must be above 0"):
        LatentStream(one_cache, BATCH, epochs=epochs)


@pytest.mark.parametrize(
    "ranks",
    [{"world_size": 3}, {"world_size": 0}, {"rank": 2, "world_size": 2}, {"rank": -1}],
    ids=str,
)
def test_a_batch_must_divide_and_a_rank_lie_among_the_ranks(one_cache, ranks):
    with pytest.raises(ConfigError, match="must divide among ranks"):
        LatentStream(one_cache, BATCH, **ranks)


def test_joined_caches_stream_by_row_and_resume(tmp_path):
    paths = {
        name: make_cache(tmp_path / name, rng_latents(seed), rejected=rejected, samples_per_shard=size)
        for name, seed, rejected, size in (("world", 1, [2, 5], 8), ("tower", 2, [5, 19], 3))
    }
    batches = list(LatentStream(paths, batch_size=4, seed=3))
    world = open_joined(paths).caches["world"]
    rows = [row for row in range(20) if row not in (2, 5)]
    for batch in batches:
        read = open_joined(paths).samples(batch["numbers"].numpy(), ["row"])["row"].to_numpy()
        expected = world.read(np.searchsorted(rows, read))
        np.testing.assert_array_equal(batch["latents"]["world"].numpy(), expected)
        assert set(batch["latents"]) == {"world", "tower"}
    resumed = LatentStream(paths, batch_size=4, seed=3)
    resumed.load_state_dict({"cursor": batches[1]["cursor"]})
    rest = list(resumed)
    assert [each["numbers"].tolist() for each in rest] == [each["numbers"].tolist() for each in batches[2:]]


def rng_latents(seed):
    return np.random.default_rng(seed).standard_normal((20, 4, 6, 5)).astype(np.float32)
