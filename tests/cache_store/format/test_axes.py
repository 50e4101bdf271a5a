"""A sample has one to four named axes: what is written, read, checked and summed up follows the spec's."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xarray
import zarr

from cache_store import open_cache
from cache_store.cache.info import describe
from cache_store.convert.convert import ConvertConfig, convert
from cache_store.errors import CacheError
from cache_store.format.record import parse_record
from cache_store.format.schema import SampleLayout
from cache_store.verify.verify import verify
from tests.cache_store.conftest import CACHED_ROWS, REJECTED, ROWS, flip, shard_name
from tests.make_cache import AXES, make_cache

SHAPES = {1: (12,), 2: (3, 8), 3: (4, 3, 2), 4: (2, 3, 4, 5)}


@pytest.fixture(params=SHAPES, ids=lambda count: ",".join(AXES[count]))
def shape(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return SHAPES[request.param]


@pytest.fixture
def samples(shape) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, *shape)).astype(np.float16).astype(np.float32)


@pytest.fixture
def any_cache(samples, form, tmp_path) -> Path:
    store_format, codec = form
    return make_cache(tmp_path / "cache", samples, rejected=REJECTED, store_format=store_format, codec=codec)


def test_samples_of_any_axes_are_sound_and_read_in_any_order(any_cache, samples):
    assert not verify(any_cache, "deep").findings
    order = np.random.default_rng(1).permutation(len(CACHED_ROWS))
    np.testing.assert_array_equal(open_cache(any_cache).read(order), samples[CACHED_ROWS][order].astype(np.float16))


def test_a_flipped_bit_names_its_row_whatever_the_axes(any_cache):
    name = shard_name(any_cache, 1)
    flip(any_cache / name, (any_cache / name).stat().st_size // 3)
    found = [(finding.file, finding.row) for finding in verify(any_cache, "deep").findings]
    assert (name, None) in found
    assert any(row is not None and 8 <= row < 16 for _, row in found)


def test_statistics_run_along_the_feature_axis(any_cache, samples, shape):
    values = samples[CACHED_ROWS].astype(np.float64)
    features = np.moveaxis(values, 1 if len(shape) == 3 else -1, 0).reshape(shape[0 if len(shape) == 3 else -1], -1)
    summary = open_cache(any_cache).seal.array
    np.testing.assert_allclose(summary.mean, features.mean(1), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(summary.std, features.std(1), rtol=1e-9)
    np.testing.assert_array_equal((summary.minimum, summary.maximum), (features.min(1), features.max(1)))
    assert (summary.preview is None) == (len(shape) != 3)


def test_converting_there_and_back_gives_equal_bytes(samples, tmp_path):
    root = make_cache(tmp_path / "cache", samples, rejected=REJECTED)
    tars, back = tmp_path / "tars", tmp_path / "back"
    convert(root, tars, ConvertConfig(format="webdataset"), lambda _: None)
    convert(tars, back, ConvertConfig(format="zarr"), lambda _: None)
    assert not verify(tars, "deep").findings
    files = [path.relative_to(root) for path in root.rglob("*") if path.is_file() and ".claim" not in path.parts]
    assert [name for name in files if (root / name).read_bytes() != (back / name).read_bytes()] == []


def test_public_readers_see_the_axes_by_name(samples, shape, tmp_path):
    root = make_cache(tmp_path / "cache", samples, rejected=REJECTED)
    stored = samples[CACHED_ROWS].astype(np.float16)
    np.testing.assert_array_equal(zarr.open_group(root, mode="r")["latents"][:][CACHED_ROWS], stored)
    with xarray.open_zarr(root, chunks=None) as dataset:
        assert dataset["latents"].dims == ("row", *AXES[len(shape)])


def test_info_names_the_axes(any_cache, shape):
    named = ", ".join(f"{axis} {side}" for axis, side in zip(AXES[len(shape)], shape, strict=True))
    assert dict(describe(any_cache))["array"].startswith(f"float16 [{named}], codec ")


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
    with pytest.raises(CacheError, match="is not a valid SampleLayout") as refused:
        parse_record(SampleLayout, msgspec.json.encode(layout), "zarr.json")
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
