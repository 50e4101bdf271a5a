"""Every Zarr v3 reader sees the same values in a cache, for every codec and dtype."""

from pathlib import Path

import numpy as np
import pytest
import tensorstore
import xarray
import zarr

from cache_store import open_cache
from cache_store.format.schema import DTYPES
from tests.cache_store.conftest import CACHED_ROWS, REJECTED, SHAPES, samples_of
from tests.make_cache import AXES, make_cache

CODECS = ("none", "lz4", "zstd")


def read_with_zarr(path: Path) -> np.ndarray:
    return np.asarray(zarr.open_group(path, mode="r")["latents"][:])


def read_with_zarrs(path: Path) -> np.ndarray:
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        return read_with_zarr(path)


def read_with_xarray(path: Path) -> np.ndarray:
    with xarray.open_zarr(path, chunks=None) as dataset:
        assert dataset["latents"].dims == ("row", *AXES[dataset["latents"].ndim - 1])
        return np.asarray(dataset["latents"].values)


def read_with_tensorstore(path: Path) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": f"file://{path}/latents"}
    return np.asarray(tensorstore.open(spec).result().read().result())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("read", [read_with_zarr, read_with_zarrs, read_with_xarray, read_with_tensorstore])
@pytest.mark.parametrize("shape", SHAPES)
def test_public_readers_see_values_and_axes_as_written(tmp_path, codec, read, shape):
    samples = samples_of(shape)
    values = read(make_cache(tmp_path / "cache", samples, rejected=REJECTED, codec=codec))
    assert values.dtype == np.float16
    np.testing.assert_array_equal(values[CACHED_ROWS], samples[CACHED_ROWS].astype(np.float16))
    assert np.isnan(values[list(REJECTED)]).all(), "a rejected row must not read as a number"


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("codec", CODECS)
def test_tensorstore_and_we_read_every_dtype(tmp_path, latents, codec, dtype):
    path = make_cache(tmp_path / "cache", latents, rejected=REJECTED, codec=codec, dtype=dtype)
    stored = latents[CACHED_ROWS].astype(DTYPES[dtype])
    np.testing.assert_array_equal(read_with_tensorstore(path)[CACHED_ROWS], stored)
    np.testing.assert_array_equal(open_cache(path).read(np.arange(len(CACHED_ROWS))), stored, strict=True)
