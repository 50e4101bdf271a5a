"""Arrays of every format, codec, dtype and number of axes: verified, read by us and by public readers, and summed."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorstore
import webdataset
import xarray
import zarr

from cache_store import CacheError, open_cache
from cache_store.cli import main
from cache_store.format.array import DTYPES
from cache_store.format.quantized import as_read
from cache_store.verify.verify import verify
from tests.cache_store.conftest import ROWS, SHAPES
from tests.cache_store.signing import edited_spec
from tests.make_cache import AXES, caption, make_cache
from tests.named import assert_names

REJECTED = (3, 9, 29, *range(16, 24))
"""They include one whole shard."""
CACHED = [row for row in range(ROWS) if row not in REJECTED]
KEYS = [f"{row:012d}" for row in CACHED]
VAE_SHAPE = (4, 6, 5)
ZARRS = [
    *((VAE_SHAPE, {"codec": codec, "dtype": dtype}) for codec in ("none", "lz4", "zstd") for dtype in DTYPES),
    *((shape, {"codec": codec}) for shape in SHAPES for codec in ("none", "zstd")),
]
TARS = [
    *((VAE_SHAPE, {"store_format": "webdataset", "dtype": dtype}) for dtype in ("float16", "float32")),
    *((shape, {"store_format": "webdataset"}) for shape in SHAPES),
]


@pytest.fixture(scope="module", params=ZARRS + TARS, ids=str)
def array(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A cache and its samples as it gives them; dtypes but uint8 hold the values exactly, and codecs compress them."""
    shape, options = request.param
    samples = (np.round(4 * np.random.default_rng(7).standard_normal((ROWS, *shape))) / 4).astype(np.float32)
    captions = [caption(f'größer als {row} \U0001f600 \\ "') for row in range(ROWS)]
    path = tmp_path_factory.mktemp("array") / "cache"
    make_cache(path, samples, None, captions, rejected=REJECTED, **options)
    return path, as_read(samples, options.get("dtype", "float16"))


zarrs = pytest.mark.parametrize("array", ZARRS, indirect=True, ids=str)
tars = pytest.mark.parametrize("array", TARS, indirect=True, ids=str)


def test_samples_of_any_array_are_sound_and_read_in_any_order(array, capsys):
    path, samples = array
    for level in ("quick", "full", "deep"):
        report = verify(path, level)
        assert (report.findings, report.shards, report.covered, report.samples) == ((), 4, 4, len(CACHED))
    order = np.random.default_rng(1).permutation(len(CACHED))
    np.testing.assert_array_equal(open_cache(path).read(order), samples[CACHED][order], strict=True)
    array = open_cache(path).spec.array
    axes = ", ".join(f"{axis} {array.features}" if axis == array.feature_axis else axis for axis in array.axes)
    assert main(["info", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"\narray           {array.dtype} [{axes}], codec " in out
    assert f"{len(samples)} rows in 4 shards, {[*samples.shape[1:]]}, " in out


def test_the_seals_statistics_run_along_the_feature_axis(array):
    path, samples = array
    features_last = np.moveaxis(samples[CACHED], 1, -1) if samples.ndim == 4 else samples[CACHED]
    values = features_last.reshape(-1, features_last.shape[-1]).astype(np.float64)
    summary = open_cache(path).seal.array
    np.testing.assert_allclose(summary.mean, values.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(summary.std, values.std(0), rtol=1e-12)
    np.testing.assert_array_equal((summary.minimum, summary.maximum), (values.min(0), values.max(0)))
    assert (summary.preview is None) == (samples.ndim != 4)


# Public readers.


@zarrs
def test_readers_of_zarr_see_values_and_axes_as_written(array):
    """Only TensorStore reads bfloat16. Of uint8 they see codes, which the samples table turns into values."""
    path, samples = array
    spec = open_cache(path).spec
    is_quantized, (name,) = spec.array.is_quantized, spec.names
    spec = {"driver": "zarr3", "kvstore": f"file://{path}/latents/{name}"}
    found = [tensorstore.open(spec).result().read().result()]
    if samples.dtype != "bfloat16":
        found.append(zarr.open_group(path, mode="r")["latents"][name][:])
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            found.append(zarr.open_group(path, mode="r")["latents"][name][:])
        with xarray.open_zarr(path, group="latents", chunks=None) as dataset:
            assert dataset[name].dims == ("row", *AXES[samples.ndim - 1])
            found.append(dataset[name].values)
    for values in map(np.asarray, found):
        if is_quantized:
            np.testing.assert_array_equal(values_of_codes(path, values[CACHED]), samples[CACHED], strict=True)
            continue
        np.testing.assert_array_equal(values[CACHED], samples[CACHED], strict=True)
        assert np.isnan(values[[*REJECTED]].astype(np.float32)).all(), "a rejected row must not read as a number"


def values_of_codes(path: Path, codes: np.ndarray) -> np.ndarray:
    rows = [row for file in sorted((path / "samples").iterdir()) for row in pq.read_table(file).to_pylist()]
    cached = [row for row in rows if row["status"] == "cached"]
    low, step = (np.array([row[name] for row in cached], np.float32) for name in ("uint8_low", "uint8_step"))
    return low[:, :, None, None] + step[:, :, None, None] * codes


def shards_of(array: tuple[Path, np.ndarray]) -> list[str]:
    return sorted(map(str, (array[0] / "shards").iterdir()))


def assert_same(found: list[tuple[str, np.ndarray, dict[str, object]]], array: tuple[Path, np.ndarray]) -> None:
    """Check the key, latent and JSON of every cached row."""
    keys, latents, contents = zip(*found, strict=True)
    assert [*keys] == KEYS
    np.testing.assert_array_equal(latents, array[1][CACHED])
    rows = open_cache(array[0]).samples(np.arange(len(CACHED))).to_pylist()
    texts = [{name: row[name] for name in ("id", "uri", "conversations")} for row in rows]
    assert [*contents] == [{"sha256": row["content_sha256"], **text} for row, text in zip(rows, texts, strict=True)]


@tars
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset 1.0 leaves closing to the collector
def test_webdataset_and_hugging_face_datasets_open_the_tars(array, tmp_path):
    opened: list[Any] = [webdataset.WebDataset(shards_of(array), shardshuffle=False).decode()]
    options = {"split": "train", "cache_dir": str(tmp_path), "data_files": shards_of(array)}
    opened += [datasets.load_dataset("webdataset", streaming=streaming, **options) for streaming in (False, True)]
    for samples in opened:
        assert_same([(each["__key__"], np.array(each["latent.npy"]), each["json"]) for each in samples], array)


# What cannot be stored, and what cannot be.


def test_a_value_that_is_not_finite_rejects_its_sample_alone(tmp_path, latents):
    broken = latents.copy()
    broken[5, 0, 0, 0], broken[6, 1, 2, 3] = np.nan, 1e6
    cache = open_cache(make_cache(tmp_path / "cache", broken))
    assert cache.seal.reasons == {"latent not finite": 1, "latent overflows float16": 1}
    kept = np.delete(latents, (5, 6), axis=0).astype(np.float16)
    np.testing.assert_array_equal(cache.read(np.arange(len(cache))), kept)
    wider = make_cache(tmp_path / "wider", broken, dtype="float32")
    assert open_cache(wider).seal.reasons == {"latent not finite": 1}


def test_latents_that_are_all_equal_can_be_sealed(tmp_path):
    summary = open_cache(make_cache(tmp_path / "cache", np.zeros((3, 4, 6, 5), np.float32))).seal.array
    assert summary.std == (0.0,) * 4
    assert np.isfinite(summary.preview.weight).all()


TOWER: dict[str, Any] = {"axes": ["token", "feature"], "feature_axis": "feature", "features": 8, "has_preview": False}
VAE: dict[str, Any] = {"axes": ["c", "y", "x"], "feature_axis": "c", "features": 4, "has_preview": True}
REFUSED: list[tuple[dict[str, Any], list[int], str]] = [
    (TOWER | {"axes": []}, [], "array.axes"),
    (TOWER | {"axes": ["a", "b", "c", "d", "e"]}, [1] * 5, "array.axes 4"),
    (TOWER, [3], "token, feature, shape"),
    (TOWER, [3] * 10_000, "shape 10000"),
    (TOWER, [0, 8], "0"),
    (TOWER, [3, 2**16 + 1], "shape 65536"),
    (TOWER, [3, 9], "feature 9 8"),
    (TOWER | {"axes": ["feature", "feature"]}, [3, 8], "axes"),
    (TOWER | {"axes": ["row", "feature"]}, [3, 8], "axes row"),
    *((TOWER | {"axes": [name, "feature"]}, [3, 8], "array.axes") for name in ("to\nken", "token\n", "t" * 33)),
    (TOWER | {"feature_axis": "channel"}, [3, 8], "feature_axis channel"),
    (TOWER | {"has_preview": True}, [3, 8], "preview"),
    (VAE | {"feature_axis": "x"}, [4, 3, 2], "preview"),
    (TOWER | {"has_preview": None}, [3, 8], "array.has_preview `bool`, `null`"),
    ({"dtype": "bfloat16"}, [4, 6, 5], "float16 float32"),
    ({"codec": "zstd"}, [4, 6, 5], "tars"),
]


def test_an_array_that_cannot_be_is_refused_in_one_line(tmp_path):
    cache = make_cache(tmp_path / "cache", np.zeros((3, 4, 6, 5), np.float32), store_format="webdataset")
    sound = (cache / "zarr.json").read_bytes()
    for fields, shape, names in REFUSED:
        (cache / "zarr.json").write_bytes(sound)
        with edited_spec(cache) as spec:
            spec["array"] |= fields
            spec["arrays"][0]["shape"] = shape
        with pytest.raises(CacheError) as refused:
            open_cache(cache)
        assert_names(refused.value, f"{cache} {names}")
        assert "\n" not in str(refused.value)
