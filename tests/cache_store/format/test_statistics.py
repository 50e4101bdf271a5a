import numpy as np

from cache_store import open_cache
from cache_store.format.statistics import RunningStatistics, summarise
from tests.make_cache import make_array, make_cache, make_encoder


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
