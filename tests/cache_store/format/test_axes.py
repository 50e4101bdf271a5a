"""A sample has one to four named axes: what is written, read, checked and summed up follows the spec's."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cache.info import describe
from cache_store.errors import CacheError
from cache_store.format.record import parse_record
from cache_store.format.schema import SampleLayout
from cache_store.verify.verify import verify
from tests.cache_store.conftest import CACHED_ROWS, REJECTED, SHAPES, flip, samples_of, shard_name
from tests.make_cache import AXES, make_cache


@pytest.fixture(params=SHAPES, ids=str)
def samples(request: pytest.FixtureRequest) -> np.ndarray:
    return samples_of(request.param)


@pytest.fixture
def any_cache(samples, form, tmp_path) -> Path:
    store_format, codec = form
    return make_cache(tmp_path / "cache", samples, rejected=REJECTED, store_format=store_format, codec=codec)


def test_samples_of_any_axes_are_sound_and_read_in_any_order(any_cache, samples):
    assert not verify(any_cache, "deep").findings
    order = np.random.default_rng(1).permutation(len(CACHED_ROWS))
    np.testing.assert_array_equal(open_cache(any_cache).read(order), samples[CACHED_ROWS][order].astype(np.float16))
    shape = samples.shape[1:]
    named = ", ".join(f"{axis} {side}" for axis, side in zip(AXES[len(shape)], shape, strict=True))
    assert dict(describe(any_cache))["array"].startswith(f"float16 [{named}], codec ")


def test_a_flipped_bit_names_its_row_whatever_the_axes(any_cache):
    name = shard_name(any_cache, 1)
    flip(any_cache / name, (any_cache / name).stat().st_size // 3)
    found = [(finding.file, finding.row) for finding in verify(any_cache, "deep").findings]
    assert (name, None) in found
    assert any(row is not None and 8 <= row < 16 for _, row in found)


def test_the_seals_statistics_run_along_the_feature_axis(any_cache, samples):
    features_last = np.moveaxis(samples[CACHED_ROWS], 1, -1) if samples.ndim == 4 else samples[CACHED_ROWS]
    values = features_last.reshape(-1, features_last.shape[-1]).astype(np.float64)
    summary = open_cache(any_cache).seal.array
    np.testing.assert_allclose(summary.mean, values.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(summary.std, values.std(0), rtol=1e-12)
    np.testing.assert_array_equal((summary.minimum, summary.maximum), (values.min(0), values.max(0)))
    assert (summary.preview is None) == (samples.ndim != 4)


TOWER: dict[str, Any] = {"axes": ["token", "feature"], "shape": [3, 8], "feature_axis": "feature", "has_preview": False}
VAE: dict[str, Any] = {"axes": ["c", "y", "x"], "shape": [4, 3, 2], "feature_axis": "c", "has_preview": True}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no axes": (TOWER | {"axes": [], "shape": []}, "length >= 1"),
    "five axes": (TOWER | {"axes": ["a", "b", "c", "d", "e"], "shape": [1] * 5}, "length <= 4"),
    "fewer sides than axes": (TOWER | {"shape": [3]}, "the axes are token, feature, but shape has 1"),
    "more sides than axes": (TOWER | {"shape": [3] * 10_000}, "but shape has 10000"),
    "a side of nothing": (TOWER | {"shape": [0, 8]}, "int` >= 1"),
    "a side too long": (TOWER | {"shape": [3, 2**16 + 1]}, "int` <= 65536"),
    "one name twice": (TOWER | {"axes": ["feature", "feature"]}, "must differ, also from row"),
    "the rows' own name": (TOWER | {"axes": ["row", "feature"]}, "must differ, also from row"),
    "no plain name": (TOWER | {"axes": ["to\nken", "feature"]}, "matching regex"),
    "a name that ends a line": (TOWER | {"axes": ["token\n", "feature"]}, "matching regex"),
    "a long name": (TOWER | {"axes": ["t" * 33, "feature"]}, "matching regex"),
    "features along no axis": (TOWER | {"feature_axis": "channel"}, "feature_axis channel is none of the axes"),
    "a preview of two axes": (TOWER | {"has_preview": True}, "a preview needs three axes, features first"),
    "a preview of features last": (VAE | {"feature_axis": "x"}, "a preview needs three axes, features first"),
    "no word on previews": (TOWER | {"has_preview": None}, "Expected `bool`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_that_cannot_be_is_refused_in_one_line(name):
    layout, why = REFUSED[name]
    with pytest.raises(CacheError, match="does not hold what it should") as refused:
        parse_record(SampleLayout, msgspec.json.encode(layout), "zarr.json")
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
