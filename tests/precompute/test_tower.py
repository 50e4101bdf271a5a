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
from tests.precompute.conftest import BROKEN, SAMPLES, Project, flip, image_bytes, timeless_files
from tests.precompute.encoders.tower import FEATURES, make_tower, register_tower

TOKENS = 20
GOOD = [number for number in range(SAMPLES) if number not in BROKEN]


@pytest.fixture
def tower(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """With a cache that the toy tower made."""
    register_tower(monkeypatch)
    project.vae = make_tower(project.folder / "tower")
    project.build(run__workers=1)
    return project


def encoded(project: Project, numbers: list[int]) -> np.ndarray:
    """What the tower makes of these images, without a cache, float16."""
    images = [Image.open(io.BytesIO(image_bytes(number))) for number in numbers]
    fitted = np.stack([np.asarray(image.resize((40, 32), Image.Resampling.BILINEAR)) for image in images])
    encoder = load_encoder(EncoderConfig(model=str(project.vae), device="cpu"), "signed")
    return encoder.encode(torch.from_numpy(fitted)).numpy().astype(np.float16)


def test_a_tower_is_cached_token_by_token_and_read_in_any_order(tower):
    cache = open_cache(tower.cache)
    order = np.random.default_rng(0).permutation(len(GOOD))
    expected = encoded(tower, [GOOD[place] for place in order])
    assert expected.shape == (len(GOOD), TOKENS, FEATURES)
    np.testing.assert_allclose(cache.read(order), expected, rtol=1e-2, atol=1e-2)  # rounding, in another batch
    assert not verify(tower.cache, "deep").findings


def test_a_tower_has_sums_per_feature_and_no_preview(tower):
    content = read_commit(tower.cache, 0).content
    assert (len(content.statistics.sum), content.statistics.count) == (FEATURES, content.cached * TOKENS)
    assert content.preview is None
    summary = open_cache(tower.cache).seal.array
    assert (len(summary.mean), summary.preview) == (FEATURES, None)


def test_a_tower_joins_a_vaes_cache_of_the_same_plan(built, monkeypatch):
    register_tower(monkeypatch)
    built.vae = make_tower(built.folder / "model")
    built.build(name="tower", source={"kind": "cache", "path": str(built.cache)}, run__workers=1)
    joined = open_joined({"world": built.cache, "tower": built.folder / "tower"})
    numbers = np.array([7, 2])
    read = joined.read(numbers)
    assert {name: each.shape[1:] for name, each in read.items()} == {"world": (16, 4, 5), "tower": (TOKENS, FEATURES)}
    np.testing.assert_array_equal(read["tower"], open_cache(built.folder / "tower").read(numbers))


def test_info_names_a_towers_axes(tower):
    assert f"float16 [token {TOKENS}, feature {FEATURES}], codec none" in tower.run(cache_store, "info", tower.cache)


def test_a_flipped_bit_of_a_tower_names_its_row(tower):
    flip(tower.cache / "latents/c/1/0/0")
    assert any(finding.row in range(8, 16) for finding in verify(tower.cache, "deep").findings)


@pytest.mark.parametrize("name", ["latents/c/1/0/0", "samples/000001.parquet", "commits/000001.json"])
def test_a_towers_lost_file_is_repaired_to_identical_bytes(tower, name):
    with tower.same_in_the_end():
        tower.lose(name)
        tower.repair("--report", tower.report())


def test_a_towers_lost_spec_is_copied_back(tower):
    with tower.same_in_the_end():
        tower.lose("zarr.json", "latents/zarr.json")
        tower.build(run__workers=1)


def test_a_tower_is_converted_there_and_back_bit_by_bit(tower):
    tars, back = tower.folder / "tars", tower.folder / "back"
    tower.run(cache_store, "convert", tower.cache, tars, "--format", "webdataset")
    tower.run(cache_store, "convert", tars, back, "--format", "zarr")
    before, after = timeless_files(tower.cache), timeless_files(back)
    assert before == after
    assert not verify(tars, "deep").findings


def test_an_audit_compares_a_towers_samples_with_its_images(tower):
    said = tower.run(main, "audit", tower.cache, "--samples", "1000")
    assert f"all {len(GOOD)} cached samples were compared: 0 differ" in said


def test_a_towers_gallery_says_what_it_can_show_and_why_not_more(tower):
    page = tower.folder / "page.html"
    said = tower.run(main, "gallery", tower.cache, "-o", page)
    why = f"nothing maps [token {TOKENS}, feature {FEATURES}] to colours; shown are source images, distributions"
    assert f"without pictures of samples: {why}" in said
    text = page.read_text()
    assert f"No pictures of samples: {why}" in text
    assert "source image of row 0" in text
    assert "histograms of the features" in text
    assert "means of feature" not in text
    assert "latent preview" not in text
    assert "channel" not in text


def test_decoding_a_towers_samples_is_refused_in_one_line(tower):
    said = tower.run(main, "gallery", tower.cache, "-o", tower.folder / "page.html", "--decode", code=1)
    assert "is of class ToyTower, which has no decoder" in said
    assert len(said.strip().splitlines()) == 1


def test_a_size_that_a_tower_would_crop_is_refused(tower):
    said = tower.build(name="other", image__height=36, code=2)
    assert "image.height and image.width must be multiples of 8, got 36x40" in said


def test_another_towers_weights_are_refused_for_the_cache(tower):
    tower.vae = make_tower(tower.folder / "retrained", seed=1)
    with tower.untouched():
        assert "encoder.weights_sha256" in tower.build(run__workers=1, code=1)
