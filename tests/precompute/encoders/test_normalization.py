"""Normalised latents are those that diffusers' pipelines make for their transformers, by their own code."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    Flux2Pipeline,
    FluxImg2ImgPipeline,
    QwenImageImg2ImgPipeline,
    StableDiffusionXLImg2ImgPipeline,
)

from cache_store import denormalize, normalize
from cache_store.errors import ConfigError
from cache_store.format.array import Normalization
from tests.precompute.encoders.loading import load, photos

BLOCKS = {
    "block_out_channels": [8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "norm_num_groups": 4,
}


def statistics(channels: int) -> dict[str, list[float]]:
    values = torch.rand(2, channels, generator=torch.Generator().manual_seed(0)).tolist()
    return {"latents_mean": values[0], "latents_std": values[1]}


def flux2_vae() -> Any:
    vae = AutoencoderKLFlux2(**BLOCKS, latent_channels=4)
    for values in (vae.bn.running_mean, vae.bn.running_var):
        values.uniform_(generator=torch.Generator().manual_seed(1))
    return vae


def encoded(pipeline: Any, pipe: Any, latents: torch.Tensor) -> Any:
    """Return the latents as the pipeline's own method normalises them."""
    if pipeline is not StableDiffusionXLImg2ImgPipeline:
        return pipeline._encode_vae_image(pipe, latents, None)
    image = torch.zeros(2, 3, 8, 8)
    return pipeline.prepare_latents(pipe, image, None, 2, 1, torch.float32, "cpu", add_noise=False)


CASES = [
    (FluxImg2ImgPipeline, lambda: AutoencoderKL(**BLOCKS, scaling_factor=0.3611, shift_factor=0.1159)),
    (StableDiffusionXLImg2ImgPipeline, lambda: AutoencoderKL(**BLOCKS, scaling_factor=0.5, **statistics(4))),
    (Flux2Pipeline, flux2_vae),
    (QwenImageImg2ImgPipeline, lambda: AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1, z_dim=3, **statistics(3))),
]


@pytest.mark.parametrize(("pipeline", "make"), CASES)
def test_normalised_latents_are_the_pipelines(pipeline, make, tmp_path):
    """For numpy and torch, and back."""
    torch.manual_seed(0)
    vae = make().eval().requires_grad_(False)
    vae.save_pretrained(tmp_path)
    encoder = load(tmp_path)
    latents = encoder.encode(photos(16, 32))
    framed = latents.unsqueeze(2) if pipeline is QwenImageImg2ImgPipeline else latents
    stub = SimpleNamespace(config=vae.config, bn=getattr(vae, "bn", None), to=vae.to)
    stub.encode = lambda image: SimpleNamespace(latents=framed)
    pipe = SimpleNamespace(vae=stub, _patchify_latents=Flux2Pipeline._patchify_latents)
    expected = encoded(pipeline, pipe, framed).reshape(normalize(latents, encoder.identity).shape)
    torch.testing.assert_close(normalize(latents, encoder.identity), expected, rtol=1e-6, atol=1e-6)
    by_numpy = normalize(latents.numpy(), encoder.identity)
    np.testing.assert_allclose(by_numpy, expected.numpy(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(denormalize(expected, encoder.identity), latents, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "patch"), [(torch.from_numpy, 1), (np.array, 2)], ids=["torch", "numpy"])
def test_each_frame_of_a_clip_is_normalised_as_an_image(kind, patch):
    """With as many frames as channels, too."""
    channels = 4 * patch**2
    values = {name: tuple(each) for name, each in statistics(channels).items()}
    by = Normalization(**values, latents_shift=0.5, latents_scale=2.0, latents_patch=patch)
    clips = np.random.default_rng(0).standard_normal((2, 4, 4, 6, 8), np.float32)
    found = normalize(kind(clips), by, channel_axis=-4)
    expected = np.stack([normalize(clips[:, :, frame], by) for frame in range(4)], axis=2)
    np.testing.assert_array_equal(np.asarray(found), expected)
    back = np.asarray(denormalize(found, by, channel_axis=-4))
    np.testing.assert_allclose(back, clips, rtol=1e-5, atol=1e-6)


def test_moments_and_another_number_of_channels_are_refused(tmp_path):
    by = Normalization(latents_mean=(0.0,) * 16, latents_std=(1.0,) * 16)
    with pytest.raises(ConfigError, match=r"16 channels; axis -3 .* channel_axis=-4"):
        normalize(np.zeros((2, 16, 5, 4, 4), np.float32), by)
    AutoencoderKL(**BLOCKS).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="LatentStream"):
        normalize(np.zeros((8, 4, 4), np.float32), load(tmp_path, posterior="moments").identity)
