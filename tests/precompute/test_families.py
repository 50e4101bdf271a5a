"""Caches of VAEs and vision towers hold the samples of their libraries, and are shown."""

import io

import numpy as np
from PIL import Image
from transformers import CLIPImageProcessorPil, Gemma3ImageProcessorPil

from cache_store import open_cache, open_joined
from precompute.cli import main
from precompute.encode_images import encode_images
from tests.precompute.conftest import GOOD, image_bytes
from tests.precompute.encoders.towers import FEATURES, PATCHES, SIDE, TOKENS, gemma_tokens, random_model, save_model
from trainer.model.towers import describe_samples

GEMMA = "Gemma3ForConditionalGeneration"
SQUARE = {"image__height": SIDE, "image__width": SIDE}


def test_a_towers_cache_holds_transformers_tokens_of_the_files(project, tmp_path):
    """The family's own processor prepares them; `encode_images` gives the same."""
    project.vae, project.settings = save_model(GEMMA, tmp_path / "model"), SQUARE
    project.build(image__resample="bilinear", store__dtype="float32")
    cache, order = open_cache(project.cache), np.random.default_rng(0).permutation(len(GOOD))
    images = [Image.open(io.BytesIO(image_bytes(GOOD[number]))) for number in order]
    pixels = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})(images, return_tensors="pt")["pixel_values"]
    expected = gemma_tokens(random_model(GEMMA), pixels).numpy()
    assert expected.shape == (len(GOOD), TOKENS, FEATURES)
    np.testing.assert_allclose(cache.read(order), expected, rtol=0, atol=1e-5)
    (tmp_path / "image.png").write_bytes(image_bytes(GOOD[7]))
    np.testing.assert_allclose(encode_images(cache, [tmp_path / "image.png"]), cache.read(np.array([7])), atol=1e-5)


def test_a_clip_prepares_images_by_its_own_processor(project):
    """The cache records the processor's values, and a projector the layer."""
    project.build()
    project.vae = save_model("CLIPVisionModel", project.folder / "clip")
    side = {"height": SIDE, "width": SIDE}
    CLIPImageProcessorPil(size={"shortest_edge": 36}, crop_size=side).save_pretrained(project.vae)
    project.settings = {
        "source": {"kind": "cache", "path": str(project.cache)},
        "image": {"from_model": True},
        "encoder__layer": -2,
    }
    project.build(name="clip-cache")
    both = open_joined({"world": project.cache, "clip": project.folder / "clip-cache"})
    assert {name: each.shape for name, each in both.read(np.arange(2)).items()} == {
        "world": (2, 16, 4, 5),
        "clip": (2, PATCHES, FEATURES),
    }
    world, clip = (both.caches[name].spec.array for name in ("world", "clip"))
    assert describe_samples(clip, [(PATCHES, FEATURES)])["encoder.layer"] == "-2"
    assert "encoder.layer" not in describe_samples(world, [(16, 4, 5)])
    assert clip.image.summary == f"{SIDE}x{SIDE}, edge 36, bicubic, range clip"
    project.run(main, "audit", project.folder / "clip-cache", "--samples", 5)
    assert "nothing to encode" in project.build(name="clip-cache")
