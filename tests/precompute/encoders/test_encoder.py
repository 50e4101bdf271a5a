"""Latents are diffusers' own, folded or not, whatever computes them; the hash and identity of what made them."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache_store.errors import ConfigError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder, PixelRange
from precompute.encoders.registry import load_encoder, refuse_image_size
from precompute.encoders.vaes import folded_wan
from precompute.encoders.vaes.folded_wan import FoldedWanEncoder, normalize_in_blocks, normalize_whole
from precompute.encoders.vaes.wan_files import WanConfig, encode_path
from precompute.encoders.weights import weights_sha256
from tests.precompute.encoders.conftest import narrow_vae


def load(folder: Path, pixel_range: PixelRange = "signed", **config: Any) -> Encoder:
    options = {"device": "cpu", "compute_dtype": "float32", **config}
    return load_encoder(EncoderConfig(model=str(folder), **options), pixel_range)


def encoder_of(vae: Any, folder: Path, pixel_range: PixelRange = "signed", **config: Any) -> Encoder:
    vae.save_pretrained(folder)
    return load(folder, pixel_range, **config)


def photos(number: int = 2, height: int = 24, width: int = 40) -> Tensor:
    """uint8 [N, Y, X, 3]."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (number, height, width, 3), dtype=torch.uint8, generator=generator)


def pixels(*shape: int) -> Tensor:
    """Of either sign."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


def posterior(vae: Any, image_N3YX: Tensor) -> Any:
    """By diffusers itself."""
    with torch.inference_mode():
        return vae.encode(image_N3YX.unsqueeze(2)).latent_dist


def folded(vae: Any, image_N3YX: Tensor) -> Tensor:
    with torch.inference_mode():
        return FoldedWanEncoder(vae.state_dict(), image_N3YX.dtype)(image_N3YX)


def root_mean_square(values: Tensor) -> float:
    return float(values.float().square().mean().sqrt())


@pytest.mark.parametrize(("height", "width", "scale"), [(64, 64, 1), (48, 80, 1), (8, 8, 1), (32, 32, 127.5)])
def test_folded_equals_diffusers_on_the_full_size_architecture(full_size_vae, height, width, scale):
    """Also where the input is not normalised."""
    image = (pixels(2, 3, height, width) + (scale != 1)) * scale
    expected = posterior(full_size_vae, image).parameters.squeeze(2)
    assert expected.shape == (2, 32, height // 8, width // 8)
    assert expected[:, :16].std() > 0.05
    torch.testing.assert_close(folded(full_size_vae, image), expected, rtol=0, atol=1e-5)


def test_what_a_config_leaves_out_is_what_diffusers_takes():
    defaults = {name: parameter.default for name, parameter in signature(AutoencoderKLWan.__init__).parameters.items()}
    for name, value in asdict(WanConfig()).items():
        assert value == (tuple(defaults[name]) if isinstance(value, tuple) else defaults[name]), name


SHAPES: list[dict[str, Any]] = [
    {"base_dim": 12, "num_res_blocks": 1},
    {"num_res_blocks": 3},
    {"attn_scales": [0.5, 0.25]},
]
SHAPES += [{"dim_mult": [1, 2], "temperal_downsample": [True]}, {"dim_mult": [2, 1, 3, 1], "z_dim": 5}]


@pytest.mark.parametrize("config", SHAPES)
def test_every_shape_of_wan_2_1_folds(config):
    """Without the frame cache that diffusers' `encode` hands to blocks; on frame one it changes nothing."""
    vae, image = narrow_vae(**config), pixels(2, 3, 40, 24)
    weights = {
        name: weight.shape for name, weight in vae.state_dict().items() if name.startswith(("encoder.", "quant_conv."))
    }
    assert dict(encode_path(WanConfig(**{"base_dim": 8, **config}))) == weights
    with torch.inference_mode():
        expected = vae.quant_conv(vae.encoder(image.unsqueeze(2))).squeeze(2)
    mine = FoldedWanEncoder(vae.state_dict(), torch.float32)
    for weights in vae.parameters():
        weights.data.zero_()  # it has a copy of its own
    with torch.inference_mode():
        torch.testing.assert_close(mine(image), expected, rtol=0, atol=1e-5)


def test_what_one_path_cannot_run_is_refused_with_the_other(tmp_path):
    """A model with attention scales runs folded alone."""
    with pytest.raises(ConfigError, match="encoder.fold: false cannot run a model with attn_scales"):
        encoder_of(narrow_vae(attn_scales=[0.5]), tmp_path / "scales", fold=False)


def test_bfloat16_rounds_no_worse_than_diffusers_bfloat16(full_size_vae):
    image, rounded = pixels(2, 3, 64, 64), narrow_vae(base_dim=96)
    rounded.load_state_dict(full_size_vae.state_dict())
    exact = posterior(full_size_vae, image).parameters.squeeze(2)
    theirs = posterior(rounded.bfloat16(), image.bfloat16()).parameters.squeeze(2)
    ours = folded(full_size_vae, image.bfloat16())
    assert ours.dtype == torch.bfloat16
    assert 0 < root_mean_square(ours - exact) < root_mean_square(theirs - exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_latent_does_not_depend_on_the_number_of_threads(full_size_vae, dtype):
    image = pixels(1, 3, 72, 104).to(dtype)  # odd enough that threads' shares are no multiples of a vector
    before, latents = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            latents.append(folded(full_size_vae, image))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(latents[0], other) for other in latents[1:])


@pytest.mark.parametrize("silu", [True, False])
def test_both_normalisations_agree_and_keep_zeros(silu, monkeypatch):
    """A GPU's and a CPU's."""
    monkeypatch.setattr(folded_wan, "BLOCK_ELEMENTS", 96 * 8)
    x, gain = pixels(2, 5, 7, 96), pixels(96)
    x[0, 0] = 0
    whole, blocks = normalize_whole(x, gain, silu), normalize_in_blocks(x, gain, silu, out=torch.empty_like(x))
    torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-6)
    assert blocks[0, 0].eq(0).all()
    assert torch.equal(normalize_in_blocks(x, gain, silu, out=x), blocks)


@pytest.fixture
def vae() -> Any:
    """Of four channels, and of weights that are exact in bfloat16."""
    return narrow_vae(z_dim=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4).bfloat16().float()


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize(("pixel_range", "kept"), [("signed", "mean"), ("theworld", "mean"), ("signed", "moments")])
def test_latents_are_diffusers_posterior_of_the_pixels(vae, tmp_path, pixel_range, kept, fold):
    """The mean, or mean and bounded log-variance. TheWorld feeds bytes as they are."""
    vae.quant_conv.bias.data[4:] += torch.tensor([-100.0, 100.0, 0.0, 0.0])
    encoder = encoder_of(vae, tmp_path, pixel_range, posterior=kept, fold=fold, batch_size=7)
    latents, fed = encoder.encode(photos()), photos().permute(0, 3, 1, 2).float()
    expected = posterior(vae, fed if pixel_range == "theworld" else fed / 127.5 - 1)
    wanted = expected.mean if kept == "mean" else torch.cat([expected.mean, expected.logvar], dim=1)
    torch.testing.assert_close(latents, wanted.squeeze(2), rtol=0, atol=1e-5)
    assert kept == "mean" or ((latents[:, 4] == -30).all() and (latents[:, 5] == 20).all())
    assert latents.shape[1:] == encoder.layout(24, 40).shape
    assert latents.is_contiguous()
    assert not latents.requires_grad
    identity = encoder.identity
    assert (identity.class_name, identity.path) == ("AutoencoderKLWan", "folded" if fold else "native")
    assert (identity.posterior, identity.compute_dtype, identity.batch_size) == (kept, "float32", 7)
    assert (identity.latents_std, identity.compiled) == ((1.0,) * 4, "auto" if fold else False)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (160, 168)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_on_a_cpu_a_latent_is_that_of_its_image_alone(vae, tmp_path, dtype, tolerance, height, width):
    """To rounding where small images are encoded together, to the bit where they are not."""
    encoder, images = encoder_of(vae, tmp_path, compute_dtype=dtype), photos(11, height, width)
    alone, together = torch.cat([encoder.encode(image) for image in images.split(1)]), encoder.encode(images)
    assert together.dtype == torch.float32
    allowed = tolerance * root_mean_square(alone) if height == 64 else 0
    torch.testing.assert_close(together, alone, rtol=0, atol=allowed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("config", [{"fold": False}, {"fold": True}, {"compile": True}])
def test_a_gpu_gives_the_cpus_latents(vae, tmp_path, config):
    expected = encoder_of(vae, tmp_path).encode(photos())
    latents = load(tmp_path, device="cuda", **config).encode(photos())
    torch.testing.assert_close(latents.cpu(), expected, rtol=1e-2, atol=1e-2)


SIZES: list[tuple[dict[str, Any], tuple[int, int], int | None]] = [
    ({}, size, 8) for size in ((20, 40), (24, 44), (0, 8))
]
SIZES += [({"patch_size": 2}, (40, 48), 16), *(({"dim_mult": fits}, (20, 40), None) for fits in ([1, 2, 4], 3))]


@pytest.mark.parametrize(("config", "size", "factor"), SIZES)
def test_a_size_that_would_be_cropped_is_refused_unloaded(tmp_path, config, size, factor):
    """By the config alone, which is left to the loading of the model where it makes no sense."""
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKLWan", **config}))
    with pytest.raises(ConfigError, match=f"multiples of {factor}, got ") if factor else nullcontext():
        refuse_image_size(EncoderConfig(model=str(tmp_path)), *size)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": ""}, "encoder.model is empty"),
        ({"batch_size": 0}, "encoder.batch_size must be at least 1, got 0"),
        ({"compile": True, "fold": False}, "encoder.compile needs encoder.fold: true"),
        *(
            ({"device": device}, f"encoder.device is '{device}', but")
            for device in ("gpu", "cuda:99", "cuda:x", "cpu:1")
        ),
    ],
)
def test_a_config_that_cannot_run_names_its_key(config, message):
    with pytest.raises(ConfigError, match=message):
        _ = EncoderConfig(**{"model": "org/name", **config}).torch_device


def test_the_hash_follows_the_encode_paths_values_alone(vae, tmp_path):
    """Not its files, what it stands beside, or how it runs."""
    hashed = encoder_of(vae, tmp_path).identity.weights_sha256
    edited = json.loads((tmp_path / "config.json").read_text()) | {"dropout": 0.5, "scale_factor_temporal": 2}
    (tmp_path / "config.json").write_text(json.dumps(edited))
    held = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    encode_path = {name: each for name, each in held.items() if name.startswith(("encoder.", "quant_conv."))}
    save_file(encode_path, tmp_path / "diffusion_pytorch_model.safetensors")
    assert load(tmp_path, fold=False, compute_dtype="bfloat16").identity.weights_sha256 == hashed
    vae.decoder.conv_in.weight.data += 0.25
    assert encoder_of(vae.bfloat16(), tmp_path / "bfloat16").identity.weights_sha256 == hashed
    vae.float().save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert load(tmp_path / "sharded").identity.weights_sha256 == hashed
    for name in ("encoder.conv_in.weight", "encoder.mid_block.resnets.1.norm2.gamma", "quant_conv.bias"):
        vae.get_parameter(name).data.view(-1)[-1] += 0.25
        assert encoder_of(vae, tmp_path / "changed").identity.weights_sha256 != hashed
        vae.get_parameter(name).data.view(-1)[-1] -= 0.25


def test_the_hash_follows_class_chosen_config_and_named_weights():
    configs = {"dim": 1, "more": 1}, {"dim": 2, "more": 1}, {"dim": 1, "more": 2}
    weights = torch.ones(2, 3), torch.ones(3, 2), 2 * torch.ones(2, 3)
    hashed = {
        weights_sha256(class_name, config, ["dim", "more"], [(name, weight)])
        for class_name, config, name, weight in product("AB", configs, ("first", "second"), weights)
    }
    assert len(hashed) == 2 * 3 * 2 * 3
