import numpy as np

from cache_store import open_cache
from cache_store.cache.metadata import read_seal
from cache_store.format.statistics import RunningStatistics, summarise
from tests.cache_store.conftest import CACHED_ROWS
from tests.make_cache import make_array, make_cache, make_encoder


def test_the_seal_has_the_mean_and_deviation_of_the_cached_samples(cache, latents):
    summary = read_seal(cache).array
    values = latents[CACHED_ROWS].astype(np.float64)
    np.testing.assert_allclose(summary.mean, values.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(summary.std, values.std((0, 2, 3)), rtol=1e-12)
    np.testing.assert_array_equal(summary.minimum, values.min((0, 2, 3)))
    np.testing.assert_array_equal(summary.maximum, values.max((0, 2, 3)))


def test_the_preview_recovers_a_linear_relation_of_colour():
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((6, 4, 8, 8))
    weight, bias = rng.standard_normal((3, 4)), np.array([0.2, 0.5, 0.8])
    rgb = np.einsum("rc,nchw->nhwr", weight, latent) + bias
    running = RunningStatistics(make_array((4, 8, 8), "float32", "none", make_encoder(4, [], [])))
    running.add(latent[:4], rgb[:4])
    running.add(latent[4:], rgb[4:])
    statistics, preview = running.statistics(), running.preview()
    assert statistics is not None
    assert preview is not None
    summary = summarise([statistics], [preview], 0)
    np.testing.assert_allclose(summary.preview.weight, weight, atol=1e-4)
    np.testing.assert_allclose(summary.preview.bias, bias, atol=1e-4)


def test_a_value_that_is_not_finite_rejects_its_sample_and_no_other(tmp_path, latents):
    broken = latents.copy()
    broken[5, 0, 0, 0] = np.nan
    broken[6, 1, 2, 3] = 1e6
    path = make_cache(tmp_path / "cache", broken)
    cache = open_cache(path)
    assert len(cache) == len(latents) - 2
    assert cache.seal.reasons == {"latent not finite": 1, "latent overflows float16": 1}
    kept = [row for row in range(len(latents)) if row not in (5, 6)]
    np.testing.assert_array_equal(cache.read(np.arange(len(cache))), latents[kept].astype(np.float16))


def test_a_value_too_large_for_float16_is_kept_in_float32(tmp_path, latents):
    large = latents.copy()
    large[6, 1, 2, 3] = 1e6
    assert len(open_cache(make_cache(tmp_path / "cache", large, dtype="float32"))) == len(latents)


def test_latents_that_are_all_equal_can_be_sealed(tmp_path):
    summary = open_cache(make_cache(tmp_path / "cache", np.zeros((3, 4, 6, 5), np.float32))).seal.array
    assert summary.std == (0.0,) * 4
    assert np.isfinite(summary.preview.weight).all()
