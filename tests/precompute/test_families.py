"""Caches of VAEs and vision towers hold the samples of their libraries, and are shown."""

import io
from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil, Gemma3ImageProcessorPil, SiglipImageProcessorPil

from cache_store import normalize, open_cache, open_joined
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.encode_images import encode_images
from tests.precompute.conftest import GOOD, image_bytes
from tests.precompute.encoders.test_vaes import NARROW_KL
from tests.precompute.encoders.towers import FEATURES, PATCHES, SIDE, TOKENS, gemma_tokens, random_model, save_model
from trainer.model.towers import describe_samples


def test_a_vaes_cache_verifies_audits_and_is_shown_decoded_and_normalised(project):
    torch.manual_seed(0)
    project.vae = project.folder / "model"
    diffusers.AutoencoderKLFlux2(**{**NARROW_KL, "latent_channels": 3}).save_pretrained(project.vae)
    project.build(image__width=48, store__dtype="float32")
    cache = open_cache(project.cache)
    assert (cache.arrays[0].shape, cache.spec.array.encoder.class_name) == ((3, 8, 12), "AutoencoderKLFlux2")
    assert not verify(project.cache, "full").findings
    said = project.run(main, "audit", project.cache, "--samples", 20, "--seed", 0)
    assert f"{len(GOOD)} of {len(GOOD)}" in said
    project.run(main, "gallery", project.cache, "--decode", "--rows", 2, "-o", project.folder / "page.html")
    read = cache.read(np.arange(3), normalize=True)
    assert read.shape == (3, 12, 4, 6)
    assert np.array_equal(read, normalize(cache.read(np.arange(3)), cache.spec.array.encoder))


SQUARE = {"image__height": SIDE, "image__width": SIDE}


def siglip_tokens(model: Any, pixels_N3YX: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        tokens: torch.Tensor = model.vision_model(pixels_N3YX).last_hidden_state
    return tokens


@pytest.mark.parametrize(
    ("kind", "processor", "resample", "tokens", "count"),
    [
        ("Gemma3ForConditionalGeneration", Gemma3ImageProcessorPil, "bilinear", gemma_tokens, TOKENS),
        ("SiglipModel", SiglipImageProcessorPil, "bicubic", siglip_tokens, PATCHES),
    ],
)
def test_a_towers_cache_holds_transformers_tokens_of_the_files(
    project, tmp_path, kind, processor, resample, tokens: Callable[..., Any], count
):
    """The family's own processor prepares them; `encode_images` gives the same."""
    project.vae, project.settings = save_model(kind, tmp_path / "model"), SQUARE
    project.build(image__resample=resample, store__dtype="float32")
    cache, order = open_cache(project.cache), np.random.default_rng(0).permutation(len(GOOD))
    images = [Image.open(io.BytesIO(image_bytes(GOOD[number]))) for number in order]
    pixels = processor(size={"height": SIDE, "width": SIDE})(images, return_tensors="pt")["pixel_values"]
    expected = tokens(random_model(kind), pixels).numpy()
    assert expected.shape == (len(GOOD), count, FEATURES)
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
