"""A cache of any family goes the whole way: build, verify, audit, look, read beside others of its plan, normalised."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from cache_store import normalize, open_cache, open_joined
from cache_store.verify.verify import verify
from precompute.cli import main
from tests.precompute.conftest import GOOD, Project
from trainer.model.towers import describe_samples

THREE = {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3}
NARROW_KL = {**THREE, "block_out_channels": [8, 8, 16], "norm_num_groups": 4}
PATCHED = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
VAES: list[tuple[str, dict[str, Any], dict[str, Any], tuple[int, ...]]] = [
    ("AutoencoderKL", NARROW_KL, {"encoder__posterior": "moments"}, (8, 8, 12)),
    ("AutoencoderKLFlux2", {**NARROW_KL, "latent_channels": 3}, {}, (3, 8, 12)),
    ("AutoencoderKLWan", {"base_dim": 8, "num_res_blocks": 1, **PATCHED}, {}, (16, 2, 3)),
    ("AutoencoderTiny", {}, {}, (4, 4, 6)),
]


def saved(folder: Path, make: Callable[[], Any]) -> Path:
    torch.manual_seed(0)
    make().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("class_name", "config", "settings", "shape"), VAES)
def test_a_vaes_cache_verifies_audits_and_is_shown_decoded(project: Project, class_name, config, settings, shape):
    project.vae = saved(project.folder / "model", lambda: getattr(diffusers, class_name)(**config))
    project.build(image__width=48, store__dtype="float32", **settings)
    cache = open_cache(project.cache)
    assert cache.spec.array.shape == shape
    assert cache.spec.array.encoder.class_name == class_name
    assert not verify(project.cache, "full").findings
    said = project.run(main, "audit", project.cache, "--samples", 20, "--seed", 0)
    assert f"{len(GOOD)} of {len(GOOD)}" in said
    project.run(main, "gallery", project.cache, "--decode", "--rows", 2, "-o", project.folder / "page.html")
    if class_name == "AutoencoderKLFlux2":
        read = cache.read(np.arange(3), normalize=True)
        assert read.shape == (3, 12, 4, 6)
        assert np.array_equal(read, normalize(cache.read(np.arange(3)), cache.spec.array.encoder))


def test_a_clip_prepares_images_by_itself_beside_a_vae(project: Project):
    """A second cache of the plan, with images as its processor has them, which the cache remembers as values."""
    project.build()
    clip = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    model = saved(project.folder / "clip", lambda: CLIPVisionModel(CLIPVisionConfig(**clip)))
    side = {"height": 32, "width": 32}
    CLIPImageProcessorPil(size={"shortest_edge": 36}, crop_size=side).save_pretrained(model)
    project.vae = model
    of_plan = {"source": {"kind": "cache", "path": str(project.cache)}}
    project.build(name="clip-cache", image={"from_model": True}, encoder__layer=-2, **of_plan)
    both = open_joined({"world": project.cache, "clip": project.folder / "clip-cache"})
    assert {name: each.shape for name, each in both.read(np.arange(2)).items()} == {
        "world": (2, 16, 4, 5),
        "clip": (2, 16, 16),
    }
    assert describe_samples(both.caches["clip"].spec.array)["encoder.layer"] == "-2"  # to a projector
    assert "encoder.layer" not in describe_samples(both.caches["world"].spec.array)
    recipe = both.caches["clip"].spec.array.image
    assert (recipe.fit, recipe.resample, recipe.range) == ("edge 36", "bicubic", "clip")
    project.run(main, "audit", project.folder / "clip-cache", "--samples", 5)
    assert "nothing to encode" in project.build(
        name="clip-cache", image={"from_model": True}, encoder__layer=-2, **of_plan
    )
