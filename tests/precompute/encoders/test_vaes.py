"""Every VAE's latents are diffusers' own: to the bit where diffusers runs it, to 1e-5 in float32 where it is folded."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache_store.errors import ConfigError, ModelError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder
from precompute.encoders.registry import load_decoder, load_encoder, load_reference, refuse_image_size

THREE = ["DownEncoderBlock2D"] * 3
UPS = ["UpDecoderBlock2D"] * 3
NARROW_KL = {"block_out_channels": [8, 8, 16], "down_block_types": THREE, "up_block_types": UPS, "norm_num_groups": 4}
NARROW_WAN = {"base_dim": 8, "num_res_blocks": 1}
NARROW_21 = {**NARROW_WAN, "decoder_base_dim": 8, "z_dim": 3, "latents_mean": [0.1] * 3, "latents_std": [2.0] * 3}
PATCHED = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
NARROW_COSMOS = {
    "latent_channels": 4,
    "encoder_block_out_channels": (8, 8, 16, 16),
    "decode_block_out_channels": (8, 16, 16, 16),
    "attention_resolutions": (128,),  # attention in a down block too
    "num_layers": 1,
    "latents_mean": [0.1] * 16,
    "latents_std": [2.0] * 16,
}
BLOCKS = ("ResBlock", "ResBlock", "EfficientViTBlock")


@dataclass(frozen=True)
class Vae:
    """A narrow VAE of some class, and what its encoder makes of an image."""

    class_name: str
    config: dict[str, Any]
    factor: int
    channels: int
    folds: bool = False
    has_posterior: bool = True
    scale: dict[str, Any] = field(default_factory=dict)
    """What its identity says of normalisation, as far as it is looked at."""

    def __str__(self) -> str:
        return self.class_name.removeprefix("Autoencoder")

    def save(self, folder: Path) -> Any:
        """Made of random weights that all count."""
        torch.manual_seed(0)
        vae = getattr(diffusers, self.class_name)(**self.config).eval().requires_grad_(False)
        for name, weight in vae.named_parameters():
            if weight.dim() == 1 or name.endswith("gamma"):
                weight.normal_(mean=float("norm" in name and not name.endswith("bias")), std=0.2)
        vae.save_pretrained(folder)
        return vae


KL = Vae(
    "AutoencoderKL",
    {**NARROW_KL, "shift_factor": 0.5},
    4,
    4,
    scale={"latents_shift": 0.5, "latents_scale": 0.18215, "latents_mean": ()},
)
VAES = [
    KL,
    Vae("AutoencoderKLFlux2", {**NARROW_KL, "latent_channels": 3}, 4, 3, scale={"latents_patch": 2}),
    Vae(
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "attention_head_dim": 8,
            "encoder_block_types": BLOCKS,
            "decoder_block_types": BLOCKS,
            "encoder_block_out_channels": (8, 8, 16),
            "decoder_block_out_channels": (8, 8, 16),
            "encoder_layers_per_block": (1, 1, 1),
            "decoder_layers_per_block": (1, 1, 1),
            "encoder_qkv_multiscales": ((), (), (5,)),
            "decoder_qkv_multiscales": ((), (), (5,)),
            "scaling_factor": 0.41407,
        },
        4,
        4,
        has_posterior=False,
        scale={"latents_scale": 0.41407},
    ),
    Vae(
        "AutoencoderTiny",
        {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4},
        8,
        4,
        has_posterior=False,
    ),
    Vae("AutoencoderKLWan", {**NARROW_WAN, **PATCHED}, 16, 16, folds=True),
    Vae("AutoencoderKLQwenImage", NARROW_WAN, 8, 16, folds=True),
    Vae("AutoencoderKLCosmos", NARROW_COSMOS, 8, 4, folds=True, has_posterior=False, scale={"latents_scale": 0.5}),
    Vae("AutoencoderKLQwenImage21", NARROW_21, 16, 3, folds=True, scale={"latents_std": (2.0,) * 3}),
]

NARROW_VIDEO = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
NARROW_LTX = {"layers_per_block": (1,) * 5, "latent_channels": 8}
VAES += [
    Vae("AutoencoderKLHunyuanVideo", NARROW_VIDEO, 8, 4, folds=True, scale={"latents_scale": 0.476986}),
    Vae(
        "AutoencoderKLLTXVideo",
        {
            **NARROW_LTX,
            "block_out_channels": (8,) * 4,
            "decoder_block_out_channels": (8,) * 4,
            "decoder_layers_per_block": (1,) * 5,
        },
        32,
        8,
        folds=True,
        scale={"latents_mean": (0.0,) * 8, "latents_std": (1.0,) * 8},
    ),
    Vae(
        "AutoencoderKLLTX2Video",
        {
            **NARROW_LTX,
            "block_out_channels": (8, 16, 32, 64),
            "decoder_block_out_channels": (8, 16, 32),
            "decoder_layers_per_block": (1,) * 4,
        },
        32,
        8,
        folds=True,
        scale={"latents_mean": (0.0,) * 8, "latents_std": (1.0,) * 8},
    ),
    Vae(
        "AutoencoderKLMochi",
        {
            "encoder_block_out_channels": (32,) * 4,
            "decoder_block_out_channels": (32,) * 4,
            "layers_per_block": (1,) * 5,
        },
        8,
        12,
        folds=True,
    ),
    Vae(
        "AutoencoderKLCogVideoX",
        {**NARROW_VIDEO, "invert_scale_latents": True, "scaling_factor": 4.0},
        8,
        4,
        folds=True,
        scale={"latents_scale": 0.25},
    ),
]


@pytest.fixture(params=VAES, ids=str)
def kind(request: pytest.FixtureRequest) -> Vae:
    kind: Vae = request.param
    return kind


def load(folder: Path, **config: Any) -> Encoder:
    options: dict[str, Any] = {"device": "cpu", "compute_dtype": "float32", **config}
    return load_encoder(EncoderConfig(model=str(folder), **options), "signed")


def photos(height: int, width: int, number: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (number, height, width, 3), dtype=torch.uint8, generator=generator)


def is_video(vae: Any) -> bool:
    return "QwenImage" in type(vae).__name__ or any(isinstance(each, torch.nn.Conv3d) for each in vae.modules())


@torch.inference_mode()
def by_diffusers(vae: Any, images_NYX3: Tensor) -> Any:
    """Its posterior, or its latents where it has none."""
    pixels = images_NYX3.permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1
    if vae.config.get("in_channels") == 4:
        pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1)
    (encoded,) = vae.encode(pixels.unsqueeze(2) if is_video(vae) else pixels, return_dict=False)
    return encoded


@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 96)])
def test_latents_are_diffusers_own(kind, tmp_path, height, width):
    """Mean and moments; the reference is diffusers' to the bit, and says so in its identity."""
    theirs = by_diffusers(kind.save(tmp_path), photos(height, width))
    size = height // kind.factor, width // kind.factor
    kept = {"mean": theirs.mean, "moments": torch.cat([theirs.mean, theirs.logvar], 1)} if kind.has_posterior else {}
    for posterior, expected in kept.items() or [("mean", getattr(theirs, "parameters", theirs))]:
        encoder = load(tmp_path, posterior=posterior)
        latents, expected = encoder.encode(photos(height, width)), expected.reshape(2, -1, *size)
        torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5 if kind.folds else 0)
        assert latents.std() > 0.01
        assert latents.shape[1:] == encoder.layout(height, width).shape
        reference = load_reference(EncoderConfig(model=str(tmp_path), posterior=posterior), "signed")
        assert torch.equal(reference.encode(photos(height, width)), expected)
        assert (encoder.identity.path, reference.identity.path) == ("folded" if kind.folds else "native", "native")
        assert encoder.identity.weights_sha256 == reference.identity.weights_sha256
        assert encoder.identity.posterior == (posterior if kind.has_posterior else "none")


def test_the_identity_says_how_its_transformer_takes_latents(kind, tmp_path):
    kind.save(tmp_path)
    identity = load(tmp_path).identity
    assert {name: getattr(identity, name) for name in kind.scale} == kind.scale
    assert len(identity.latents_mean) in (0, kind.channels * identity.latents_patch**2)


def test_a_decoder_is_diffusers_own(kind, tmp_path):
    vae = kind.save(tmp_path)
    latents = load(tmp_path).encode(photos(64, 96))
    decode, digest = load_decoder(EncoderConfig(model=str(tmp_path), device="cpu"))
    pictures = decode(latents)
    assert pictures.shape == (2, 3, 64, 96)
    assert digest == load(tmp_path).identity.weights_sha256
    frames = latents.unsqueeze(2) if is_video(vae) else latents
    with torch.inference_mode():
        first = vae.decode(frames[:1], return_dict=False)[0][:, :3]
    assert torch.equal(pictures[:1], first.reshape(1, 3, 64, 96))


def test_a_size_that_is_no_multiple_is_refused_unloaded(kind, tmp_path):
    """FLUX.2 joins two cells a side."""
    kind.save(tmp_path)
    multiple = kind.factor * kind.scale.get("latents_patch", 1)
    for refuse in (load(tmp_path).layout, lambda *size: refuse_image_size(EncoderConfig(model=str(tmp_path)), *size)):
        with pytest.raises(ConfigError, match=f"multiples of {multiple}, got 96x{multiple * 3 + kind.factor // 2}"):
            refuse(96, multiple * 3 + kind.factor // 2)


def test_weights_that_are_missing_are_named(kind, tmp_path):
    kind.save(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    held = load_file(path)
    lost = next(name for name in sorted(held) if name.startswith("encoder.") and name.endswith("bias"))
    save_file({name: weight for name, weight in held.items() if name != lost}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=f"1 missing key in its encode path, {lost} first"):
        load(tmp_path)


@pytest.mark.parametrize("class_name", ["AutoencoderKLAllegro", "Siglip2Model"])
def test_a_class_that_cannot_be_served_says_why(class_name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": class_name}))
    reason = "(diffusers encodes videos|its images)"
    with pytest.raises(ModelError, match=f"is of class {class_name}: {reason}"):
        load(tmp_path)


def test_a_tower_has_no_decoder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["CLIPVisionModel"]}))
    with pytest.raises(ConfigError, match="is of class CLIPVisionModel, which has no decoder"):
        load_decoder(EncoderConfig(model=str(tmp_path), device="cpu"))


@pytest.mark.parametrize("kind", [KL, *VAES[8:]], ids=str)
def test_bfloat16_is_close(kind, tmp_path):
    """Mochi takes sines of its pixels multiplied by 256 pi, which must not be rounded before."""
    kind.save(tmp_path)
    exact, rounded = (load(tmp_path, compute_dtype=each).encode(photos(64, 96)) for each in ("float32", "bfloat16"))
    assert 0 < (exact - rounded).abs().max() < 0.15 * exact.std()


WRONG: list[tuple[Vae, dict[str, Any], str]] = [
    (KL, {"fold": False}, "encoder.fold: false means nothing to a AutoencoderKL; leave it out"),
    (KL, {"compile": True}, "encoder.compile: true means nothing to a AutoencoderKL; leave it out"),
    (VAES[3], {"posterior": "moments"}, "encoder.posterior: moments means nothing to a AutoencoderTiny; leave it out"),
]


@pytest.mark.parametrize(("kind", "config", "message"), WRONG)
def test_a_field_that_is_for_other_families_is_refused(kind, config, message, tmp_path):
    kind.save(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **config)
