"""Latents as codes of 8 bits: how far they are from the values, what they keep exactly, and what is no latent."""

from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.format.layout import samples_file
from cache_store.format.quantized import dequantize, quantize
from cache_store.verify.verify import verify
from tests.cache_store.signing import edited_rows, resign
from tests.make_cache import make_cache
from tests.memory_store import MemoryStore

SHAPE = (3, 6, 5)


@pytest.fixture(scope="module")
def latents() -> np.ndarray:
    """Channels of very different ranges, one of them far from zero, one constant."""
    latents = np.random.default_rng(0).standard_normal((20, *SHAPE)).astype(np.float32)
    latents[:, 1] = latents[:, 1] * 1e-4 + 50
    latents[4, 2] = 7
    return latents


def test_a_value_is_read_back_within_half_a_step_and_the_ends_exactly(latents):
    codes, scale = quantize(latents)
    read = dequantize(codes, scale)
    half_steps = scale.uint8_step[:, :, None, None] / 2
    assert (np.abs(read - latents) <= half_steps + np.spacing(np.abs(latents))).all()
    np.testing.assert_array_equal(read.min((2, 3)), latents.min((2, 3)))
    np.testing.assert_allclose(read.max((2, 3)), latents.max((2, 3)), rtol=1e-6)
    assert (read[4, 2] == 7).all()
    assert (codes.min(), codes.max()) == (0, 255)


def test_latents_that_are_not_finite_or_overflow_are_rejected_with_a_reason(tmp_path, latents):
    latents = latents.copy()
    latents[2, 0, 0, 0], latents[5, 1, 2, 3], latents[7, 2, :, :2] = np.nan, -np.inf, (3e38, -3e38)
    cache = open_cache(make_cache(tmp_path / "cache", latents, dtype="uint8"))
    assert cache.rejected_rows().tolist() == [2, 5, 7]
    assert cache.seal.reasons == {"latent not finite": 2, "latent overflows uint8": 1}
    assert not verify(tmp_path / "cache", "deep").findings


def test_a_scale_that_changed_is_found_though_its_digest_is_right(tmp_path, latents):
    """The sums show it; a scale that is missing or not finite has a finding for its row."""
    for step, problem in (([1.0] * 3, "its sums"), ([np.inf] * 3, "non-finite"), (None, "its reason or its place")):
        path = make_cache(tmp_path / problem, latents, dtype="uint8")
        with edited_rows(path / samples_file(1)) as rows:
            rows[4]["uint8_step"] = step
        resign(path)
        findings = verify(path, "deep").findings
        assert {each.shard for each in findings} == {1}
        assert any(problem in each.problem for each in findings)


def test_samples_far_away_are_read_as_from_a_folder(tmp_path, latents):
    path, store = make_cache(tmp_path / "cache", latents, dtype="uint8", codec="lz4"), MemoryStore()
    for file in filter(Path.is_file, path.rglob("*")):
        store.put_whole(file.relative_to(path).as_posix(), file.read_bytes())
    order, near, far = np.random.default_rng(1).permutation(20), open_cache(path), open_cache(store)
    np.testing.assert_array_equal(far.read(order), near.read(order), strict=True)
    out = np.empty((20, *SHAPE), np.float32)
    assert far.read(order, out) is out
    with pytest.raises(ValueError, match="float32"):
        far.read(order, np.empty((20, *SHAPE), np.uint8))
