import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_store.errors import ConfigError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder, PixelRange
from precompute.encoders.registry import load_encoder
from precompute.encoders.spatial_factor import refuse_unfit_for


def encoder_of(vae: Any, folder: Path, pixel_range: PixelRange = "signed", **config: Any) -> Encoder:
    vae.save_pretrained(folder)
    options = {"device": "cpu", "compute_dtype": "float32", **config}
    return load_encoder(EncoderConfig(model=str(folder), **options), pixel_range)


def photos(number: int = 2, height: int = 24, width: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (number, height, width, 3), dtype=torch.uint8, generator=generator)


def diffusers_posterior(vae: Any, image_N3YX: Tensor) -> Any:
    with torch.inference_mode():
        return vae.encode(image_N3YX.unsqueeze(2)).latent_dist


@pytest.fixture
def vae(narrow_vae: Callable[..., Any]) -> Any:
    return narrow_vae(z_dim=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)


@pytest.mark.parametrize(("pixel_range", "fold"), [("signed", True), ("signed", False), ("theworld", True)])
def test_latents_are_diffusers_mode_of_the_pixels_in_their_range(vae, tmp_path, pixel_range, fold):
    """TheWorld feeds bytes as they are."""
    image = photos()
    encoder = encoder_of(vae, tmp_path, pixel_range, fold=fold)
    latents, fed = encoder.encode(image), image.permute(0, 3, 1, 2).float()
    expected = diffusers_posterior(vae, fed if pixel_range == "theworld" else fed / 127.5 - 1).mode()
    torch.testing.assert_close(latents, expected.squeeze(2), rtol=0, atol=1e-5)
    assert latents.is_contiguous()
    assert latents.shape[1:] == encoder.layout(24, 40).shape == (4, 3, 5)


@pytest.mark.parametrize("fold", [True, False])
def test_moments_are_mean_and_bounded_log_variance(vae, tmp_path, fold):
    vae.quant_conv.bias.data[4:] += torch.tensor([-100.0, 100.0, 0.0, 0.0])
    image = photos()
    encoder = encoder_of(vae, tmp_path, posterior="moments", fold=fold)
    latents = encoder.encode(image)
    expected = diffusers_posterior(vae, image.permute(0, 3, 1, 2).float() / 127.5 - 1)
    expected = torch.cat([expected.mean, expected.logvar], dim=1).squeeze(2)
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    assert (latents[:, 4] == -30).all()
    assert (latents[:, 5] == 20).all()
    assert latents.shape[1:] == encoder.layout(24, 40).shape == (8, 3, 5)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_on_a_cpu_a_latent_does_not_depend_on_its_batch(vae, tmp_path, compute_dtype):
    """Where each image is encoded alone, as all but small ones are."""
    encoder = encoder_of(vae, tmp_path, compute_dtype=compute_dtype)
    image = photos(number=3, height=160, width=168)
    alone = torch.cat([encoder.encode(one) for one in image.split(1)])
    assert torch.equal(encoder.encode(image), alone)


def test_latents_are_float32_whatever_computes_them(vae, tmp_path):
    latents = encoder_of(vae, tmp_path, compute_dtype="bfloat16").encode(photos())
    assert latents.dtype == torch.float32
    assert not latents.requires_grad


def test_the_identity_says_what_a_latent_depends_on(vae, tmp_path):
    identity = encoder_of(vae, tmp_path, posterior="moments", batch_size=7).identity
    assert (identity.class_name, identity.path, identity.posterior) == ("AutoencoderKLWan", "folded", "moments")
    assert (identity.compute_dtype, identity.batch_size, identity.compiled) == ("float32", 7, False)
    assert identity.latents_std == (1.0,) * 4
    assert len(identity.weights_sha256) == 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("config", [{"fold": False}, {"fold": True}, {"compile": True}])
def test_a_gpu_gives_the_cpus_latents(vae, tmp_path, config):
    image = photos()
    expected = encoder_of(vae, tmp_path).encode(image)
    latents = encoder_of(vae, tmp_path, device="cuda", **config).encode(image)
    torch.testing.assert_close(latents.cpu(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("size", [(20, 40), (24, 44), (0, 8)])
def test_a_size_that_would_be_cropped_is_refused(vae, tmp_path, size):
    with pytest.raises(ConfigError, match="multiples of 8"):
        encoder_of(vae, tmp_path).layout(*size)


@pytest.mark.parametrize(
    ("config", "fits"),
    [({}, False), ({"dim_mult": [1, 2, 4]}, True), ({"patch_size": 2}, False), ({"dim_mult": 3}, True)],
)
def test_a_size_is_refused_by_what_the_config_alone_says(tmp_path, config, fits):
    """There are no weights; a config that makes no sense is left to the loading of the model."""
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKLWan", **config}))
    with nullcontext() if fits else pytest.raises(ConfigError, match="got 20x40"):
        refuse_unfit_for(str(tmp_path), 20, 40)


def test_wan_2_2_runs_unfolded(narrow_vae, tmp_path):
    vae = narrow_vae(is_residual=True, patch_size=2, in_channels=12, out_channels=12)
    encoder = encoder_of(vae, tmp_path, fold=False)
    assert encoder.layout(32, 48).shape == (16, 2, 3)
    with pytest.raises(ConfigError, match="multiples of 16, got 40x48"):
        refuse_unfit_for(str(tmp_path), 40, 48)
    assert encoder.encode(photos(1, 32, 48)).shape == (1, 16, 2, 3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": ""}, "encoder.model is empty"),
        ({"batch_size": 0}, "encoder.batch_size must be at least 1, got 0"),
        ({"compile": True, "fold": False}, "encoder.compile needs encoder.fold: true"),
    ],
)
def test_a_config_that_cannot_run_names_its_key(config, message):
    with pytest.raises(ConfigError, match=message):
        EncoderConfig(**{"model": "org/name", **config})


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cuda:x", "cpu:1"])
def test_a_device_that_is_not_here_is_refused(device):
    with pytest.raises(ConfigError, match="encoder.device"):
        _ = EncoderConfig(model="org/name", device=device).torch_device
