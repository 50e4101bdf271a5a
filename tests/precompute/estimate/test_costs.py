"""The formulas of an estimate, as tables: hours, cores, and the epochs after which a cache pays off."""

from math import inf

import pytest

from cache_store.messages import shown_time
from precompute.estimate.costs import Prices, Training, build_hours, cores_to_feed
from precompute.estimate.report import in_epochs, shown_epochs

FAST = {"encode_per_s": 1_000.0, "decode_per_s": 10_000.0, "build_per_s": 1_000.0}
"""Images per second if decoding is fast."""
STARVED = {"encode_per_s": 1_000.0, "decode_per_s": 500.0, "build_per_s": 500.0}


def training(**values: float) -> Training:
    common = {"images": 3_600_000, "batch_size": 100, "gpus": 1, "sample_bytes": 25_000.0, "read_bytes_per_s": 1e9}
    return Training(**{**common, **values})


def test_hours_and_cores_are_linear():
    assert build_hours(3_600_000, 1_000.0, 1) == 1.0
    assert build_hours(3_600_000, 1_000.0, 8) == 0.125
    assert build_hours(3_600_000, 1_000.0, 64, shards=3) == pytest.approx(1 / 3), "no more workers than shards"
    assert build_hours(3_600_000, 1_000.0, 2, shards=3) == pytest.approx(2 / 3), "one of them builds two"
    assert cores_to_feed(1_500.0, 600.0, 2) == 5.0


@pytest.mark.parametrize(
    ("given", "live_step_s", "cached_step_s", "epochs"),
    [
        pytest.param(FAST | {"step_s": 0.3}, 0.4, 0.3, 1.0, id="encoding takes turns with the step: paid in one epoch"),
        pytest.param(FAST | {"step_s": 0.0}, 0.1, 0.0025, 1 / 0.975, id="reading takes its time, too"),
        pytest.param(FAST | {"step_s": 0.3, "gpus": 4}, 0.325, 0.3, 1.0, id="more GPUs share encoding and saving"),
        pytest.param(STARVED | {"step_s": 0.05}, 0.2, 0.05, 2 / 1.5, id="decoding sets the pace of short steps"),
        pytest.param(STARVED | {"step_s": 0.5}, 0.6, 0.5, 2.0, id="long steps hide it, the build does not"),
        pytest.param(FAST | {"step_s": 0.1, "read_bytes_per_s": 1e7}, 0.2, 0.25, inf, id="never: slower to read"),
    ],
)
def test_a_cache_pays_off_once_it_has_saved_its_build(given, live_step_s, cached_step_s, epochs):
    found = training(**given)
    assert (found.live_step_s, found.cached_step_s) == pytest.approx((live_step_s, cached_step_s))
    assert found.break_even_epochs() == pytest.approx(epochs)
    if epochs < inf:
        assert found.saved_gpu_hours(epochs) == pytest.approx(0.0)
    assert found.saved_gpu_hours(1.0) <= 1e-9, "one epoch is encoded either way"


@pytest.mark.parametrize(
    ("gpu_hour", "gb_month", "epochs"),
    [(2.0, 0.0, 1.0), (2.0, 0.04, 3.0), (2.0, 0.4, 21.0), (0.0, 0.04, inf), (0.0, 0.0, 1.0)],
)
def test_storage_takes_more_epochs_to_pay_off(gpu_hour, gb_month, epochs):
    """Each epoch saves one GPU-hour; the cache is 100 GB, for a month."""
    found, prices = training(**FAST, step_s=0.3), Prices(gpu_hour=gpu_hour, gb_month=gb_month)
    assert prices.break_even_epochs(found, 100e9, 1.0) == pytest.approx(epochs)
    if epochs < inf:
        assert prices.saved(found.saved_gpu_hours(epochs), 100e9, 1.0) == pytest.approx(0.0)


def test_epochs_and_short_times_are_written_in_words():
    assert [in_epochs("1"), *map(shown_epochs, (1.0, 1.3, inf))] == ["1 epoch", "1.0 epoch", "1.3 epochs", "never"]
    assert [shown_time(seconds) for seconds in (0.0, 0.4, 2.0)] == ["under 1 s", "under 1 s", "2 s"]
