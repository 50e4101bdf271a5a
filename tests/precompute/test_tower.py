"""A vision tower's cache, [token, feature], goes the whole way: build, verify, repair, convert, audit, look."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Gemma3ImageProcessorPil, SiglipImageProcessorPil

from cache_store import open_cache, open_joined
from cache_store.cache.metadata import read_commit
from cache_store.cli import main as cache_store
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.encode_images import encode_images
from tests.precompute.conftest import GOOD, Project, flip, image_bytes, timeless_files
from tests.precompute.encoders.towers import FEATURES, PATCHES, SIDE, TOKENS, gemma_tokens, random_model, save_model

SQUARE = {"image__height": SIDE, "image__width": SIDE}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("Gemma3ForConditionalGeneration", tmp_path_factory.mktemp("gemma"))


@pytest.fixture
def tower(project: Project, gemma: Path) -> Project:
    """With a cache that Gemma 3's tower made."""
    project.vae = gemma
    project.settings = SQUARE
    project.build()
    return project


def processed(processor: Any, numbers: list[int]) -> torch.Tensor:
    """The pixels that transformers feeds its model, of the images as they are in their files."""
    images = [Image.open(io.BytesIO(image_bytes(number))) for number in numbers]
    made: torch.Tensor = processor(size={"height": SIDE, "width": SIDE})(images, return_tensors="pt")["pixel_values"]
    return made


def siglip_tokens(model: Any, pixels_N3YX: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        tokens: torch.Tensor = model.vision_model(pixels_N3YX).last_hidden_state
    return tokens


FAMILIES = [
    ("Gemma3ForConditionalGeneration", Gemma3ImageProcessorPil, "bilinear", gemma_tokens, TOKENS),
    ("SiglipModel", SiglipImageProcessorPil, "bicubic", siglip_tokens, PATCHES),
]


@pytest.mark.parametrize(("kind", "processor", "resample", "tokens", "count"), FAMILIES)
def test_a_towers_cache_is_what_transformers_makes_of_the_files(
    project, tmp_path, kind, processor, resample, tokens, count
):
    """With the family's own processor, in any order, and of single images too."""
    project.vae, project.settings = save_model(kind, tmp_path / "model"), SQUARE
    project.build(image__resample=resample, store__dtype="float32")
    cache, order = open_cache(project.cache), np.random.default_rng(0).permutation(len(GOOD))
    expected = tokens(random_model(kind), processed(processor, [GOOD[place] for place in order])).numpy()
    assert expected.shape == (len(GOOD), count, FEATURES)
    np.testing.assert_allclose(cache.read(order), expected, rtol=0, atol=1e-5)
    (tmp_path / "image.png").write_bytes(image_bytes(GOOD[7]))
    np.testing.assert_allclose(encode_images(cache, [tmp_path / "image.png"]), cache.read(np.array([7])), atol=1e-5)


def test_a_tower_has_sums_for_each_feature_and_no_preview(tower):
    content, summary = read_commit(tower.cache, 0).content, open_cache(tower.cache).seal.array
    assert (len(content.statistics.sum), content.statistics.count) == (FEATURES, content.cached * TOKENS)
    assert (len(summary.mean), summary.preview, content.preview) == (FEATURES, None, None)
    said = tower.run(cache_store, "info", tower.cache)
    assert f"float16 [token {TOKENS}, feature {FEATURES}], codec none" in said
    assert "SiglipVisionModel, native, float32, averages of 2 x 2 patches, batches of 3" in said


def test_a_tower_joins_a_vaes_cache_of_the_same_plan(built, gemma):
    built.vae = gemma
    built.build(name="tower", source={"kind": "cache", "path": str(built.cache)}, **SQUARE)
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
    why = f"samples of [token {TOKENS}, feature {FEATURES}] have no preview; the page shows source images"
    assert f"without pictures of samples: {why}" in said
    shown = [f"No pictures of samples: {why}", "source image of row 0", "histograms of the features"]
    assert [each in page.read_text() for each in shown] == [True] * 3
    assert [each in page.read_text() for each in ("means of feature", "latent preview", "channel")] == [False] * 3
    (line,) = tower.run(main, "gallery", tower.cache, "-o", page, "--decode", code=2).splitlines()
    assert line.endswith("is of class Gemma3ForConditionalGeneration, which has no decoder")
    said = tower.build(name="other", image__height=36, code=2)
    assert f"image.height and image.width must be {SIDE}, as the tower was trained, got 36x{SIDE}" in said
    with tower.untouched():
        assert "array.encoder.pool" in tower.build(encoder__pool=4, code=1)
    tower.vae = save_model("SiglipModel", tower.folder / "other")
    with tower.untouched():
        assert "encoder.weights_sha256" in tower.build(encoder__pool=2, code=1)
