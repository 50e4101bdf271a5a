"""The folded encoder of Wan gives diffusers' own latents, whatever computes them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from precompute.encoders.vaes.folded_wan import FoldedWanEncoder, WanConfig, fold_weights
from tests.precompute.encoders.conftest import narrow_vae, random_vae
from tests.precompute.encoders.loading import load, photos


def pixels(*shape: int) -> Tensor:
    """Make random values in [-1, 1]."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


def posterior(vae: Any, image_N3YX: Tensor) -> Any:
    with torch.inference_mode():
        return vae.encode(image_N3YX.unsqueeze(2)).latent_dist


def fold(vae: Any, **config: Any) -> FoldedWanEncoder:
    weights = {name: each for name, each in vae.state_dict().items() if name.startswith(("encoder.", "quant_conv."))}
    encoder = FoldedWanEncoder(WanConfig(**config), torch.float32)
    encoder.load_state_dict(fold_weights(weights, 1))
    return encoder


def test_folded_equals_diffusers_on_the_full_size_architecture():
    full_size_vae, image = random_vae(), pixels(2, 3, 48, 80)
    expected = posterior(full_size_vae, image).parameters.squeeze(2)
    assert expected.shape == (2, 32, 6, 10)
    assert expected[:, :16].std() > 0.05
    with torch.inference_mode():
        torch.testing.assert_close(fold(full_size_vae)(image), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"attn_scales": [0.5, 0.25]},
        {"dim_mult": [1, 2], "temperal_downsample": [True]},
        {"dim_mult": [2, 1, 3, 1], "z_dim": 5},
    ],
)
def test_every_shape_of_wan_2_1_folds(config):
    """Compared with diffusers' layers, because its `encode` cannot run `attn_scales`."""
    vae, image = narrow_vae(**config), pixels(2, 3, 40, 24)
    with torch.inference_mode():
        expected = vae.quant_conv(vae.encoder(image.unsqueeze(2))).squeeze(2)
    encoder = fold(vae, base_dim=8, **config)
    for weight in vae.parameters():
        weight.data.zero_()  # the encoder has copies
    with torch.inference_mode():
        torch.testing.assert_close(encoder(image), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fold", [True, False])
def test_log_variances_are_bounded_and_theworld_feeds_pixels_as_they_are(vae, tmp_path, fold):
    vae.quant_conv.bias.data[4:] += torch.tensor([-100.0, 100.0, 0.0, 0.0])
    vae.save_pretrained(tmp_path)
    encoder, images = load(tmp_path, "theworld", posterior="moments", fold=fold), photos(24, 40)
    latents, expected = encoder.encode(images), posterior(vae, images[:, 0].permute(0, 3, 1, 2).float())
    wanted = torch.cat([expected.mean, expected.logvar], dim=1)
    torch.testing.assert_close(latents, wanted.squeeze(2), rtol=1e-6, atol=1e-5)
    assert (latents[:, 4] == -30).all()
    assert (latents[:, 5] == 20).all()
    assert encoder.identity.compiled == ("auto" if fold else False)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (160, 168)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_on_a_cpu_a_latent_depends_only_on_its_image(vae, tmp_path, dtype, tolerance, height, width):
    """Up to rounding for small images, which are encoded together; to the bit for others."""
    vae.save_pretrained(tmp_path)
    encoder, images = load(tmp_path, compute_dtype=dtype), photos(height, width, 11)
    alone, together = torch.cat([encoder.encode(image) for image in images.split(1)]), encoder.encode(images)
    assert together.dtype == torch.float32
    allowed = tolerance * float(alone.square().mean().sqrt()) if height == 64 else 0
    torch.testing.assert_close(together, alone, rtol=0, atol=allowed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("config", [{"fold": False}, {"fold": True}, {"compile": True}])
def test_a_gpu_gives_the_cpus_latents(vae, tmp_path, config):
    vae.save_pretrained(tmp_path)
    latents = load(tmp_path, device="cuda", **config).encode(photos(24, 40))
    torch.testing.assert_close(latents.cpu(), load(tmp_path).encode(photos(24, 40)), rtol=1e-2, atol=1e-2)
