"""An encoder that is no VAE, [token, feature], goes the whole way: build, verify, repair, convert, audit, look."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from cache_store import open_cache, open_joined
from cache_store.cache.metadata import read_commit
from cache_store.cli import main as cache_store
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.encoders.config import EncoderConfig
from precompute.encoders.registry import load_encoder
from tests.precompute.conftest import GOOD, Project, flip, image_bytes, timeless_files
from tests.precompute.encoders.tower import FEATURES, make_tower, register_tower

TOKENS = 20


@pytest.fixture
def tower(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """With a cache that the toy tower made."""
    register_tower(monkeypatch)
    project.vae = make_tower(project.folder / "tower")
    project.build()
    return project


def encoded(project: Project, numbers: list[int]) -> np.ndarray:
    """What the tower makes of these images, without a cache, float16."""
    images = [Image.open(io.BytesIO(image_bytes(number))) for number in numbers]
    fitted = np.stack([np.asarray(image.resize((40, 32), Image.Resampling.BILINEAR)) for image in images])
    encoder = load_encoder(EncoderConfig(model=str(project.vae), device="cpu"), "signed")
    return encoder.encode(torch.from_numpy(fitted)).numpy().astype(np.float16)


def test_a_tower_is_cached_token_by_token_and_read_in_any_order(tower):
    """With sums for each feature, and no preview."""
    cache, order = open_cache(tower.cache), np.random.default_rng(0).permutation(len(GOOD))
    expected = encoded(tower, [GOOD[place] for place in order])
    assert expected.shape == (len(GOOD), TOKENS, FEATURES)
    np.testing.assert_allclose(cache.read(order), expected, rtol=1e-2, atol=1e-2)  # rounding, in another batch
    content, summary = read_commit(tower.cache, 0).content, cache.seal.array
    assert (len(content.statistics.sum), content.statistics.count) == (FEATURES, content.cached * TOKENS)
    assert (len(summary.mean), summary.preview, content.preview) == (FEATURES, None, None)
    assert f"float16 [token {TOKENS}, feature {FEATURES}], codec none" in tower.run(cache_store, "info", tower.cache)


def test_a_tower_joins_a_vaes_cache_of_the_same_plan(built, monkeypatch):
    register_tower(monkeypatch)
    built.vae = make_tower(built.folder / "model")
    built.build(name="tower", source={"kind": "cache", "path": str(built.cache)})
    joined = open_joined({"world": built.cache, "tower": built.folder / "tower"})
    numbers = np.array([7, 2])
    read = joined.read(numbers)
    assert {name: each.shape[1:] for name, each in read.items()} == {"world": (16, 4, 5), "tower": (TOKENS, FEATURES)}
    np.testing.assert_array_equal(read["tower"], open_cache(built.folder / "tower").read(numbers))


def test_a_damaged_tower_is_repaired_and_converted_bit_by_bit(tower):
    tars, back = tower.folder / "tars", tower.folder / "back"
    with tower.same_in_the_end():
        flip(tower.cache / "latents/c/1/0/0")
        assert any(finding.row in range(8, 16) for finding in verify(tower.cache, "deep").findings)
        for name in ("latents/c/1/0/0", "samples/000001.parquet", "commits/000001.json"):
            tower.lose(name)
            tower.repair("--report", tower.report())
        tower.lose("zarr.json", "latents/zarr.json")
        tower.build()
    assert not verify(tower.cache, "deep").findings
    tower.run(cache_store, "convert", tower.cache, tars, "--format", "webdataset")
    tower.run(cache_store, "convert", tars, back, "--format", "zarr")
    assert timeless_files(back) == tower.files()
    assert not verify(tars, "deep").findings


def test_what_a_tower_shows_and_what_is_refused_is_said(tower):
    said = tower.run(main, "audit", tower.cache, "--samples", "1000")
    assert f"all {len(GOOD)} cached samples were compared: 0 differ" in said
    page = tower.folder / "page.html"
    said = tower.run(main, "gallery", tower.cache, "-o", page)
    why = f"nothing maps [token {TOKENS}, feature {FEATURES}] to colours; shown are source images, distributions"
    assert f"without pictures of samples: {why}" in said
    shown = [f"No pictures of samples: {why}", "source image of row 0", "histograms of the features"]
    assert [each in page.read_text() for each in shown] == [True] * 3
    assert [each in page.read_text() for each in ("means of feature", "latent preview", "channel")] == [False] * 3
    (line,) = tower.run(main, "gallery", tower.cache, "-o", page, "--decode", code=1).splitlines()
    assert "is of class ToyTower, which has no decoder" in line
    said = tower.build(name="other", image__height=36, code=2)
    assert "image.height and image.width must be multiples of 8, got 36x40" in said
    tower.vae = make_tower(tower.folder / "retrained", seed=1)
    with tower.untouched():
        assert "encoder.weights_sha256" in tower.build(code=1)
