"""Every VAE's latents are diffusers' own: to the bit if diffusers runs it, to 1e-5 in float32 if it is folded."""

import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from cache_store.errors import ConfigError
from cache_store.format.array import Size
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.registry import load_decoder, load_reference, refuse_image_size
from tests.families import first_and_slow
from tests.precompute.encoders.loading import CLIP, image_recipe, load, photos, shape_of, signed

KL_BLOCKS = {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3}
NARROW_KL = {**KL_BLOCKS, "block_out_channels": [8, 8, 16], "norm_num_groups": 4}
DC_BLOCKS, DC_SCALES = ("ResBlock", "ResBlock", "EfficientViTBlock"), ((), (), (5,))
NARROW_DC = {
    **{f"{part}_block_types": DC_BLOCKS for part in ("encoder", "decoder")},
    **{f"{part}_block_out_channels": (8, 8, 16) for part in ("encoder", "decoder")},
    **{f"{part}_layers_per_block": (1, 1, 1) for part in ("encoder", "decoder")},
    **{f"{part}_qkv_multiscales": DC_SCALES for part in ("encoder", "decoder")},
    "latent_channels": 4,
    "attention_head_dim": 8,
    "scaling_factor": 0.41407,
}
NARROW_TINY = {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4}
NARROW_WAN = {"base_dim": 8, "num_res_blocks": 1}
PATCHED_WAN = {**NARROW_WAN, "is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
NARROW_21 = {**NARROW_WAN, "decoder_base_dim": 8, "z_dim": 3, "latents_mean": [0.1] * 3, "latents_std": [2.0] * 3}
NARROW_COSMOS = {
    "encoder_block_out_channels": (8, 8, 16, 16),
    "decode_block_out_channels": (8, 16, 16, 16),
    "attention_resolutions": (128,),  # attention in a down block too
    "latent_channels": 4,
    "num_layers": 1,
    "latents_mean": [0.1] * 16,
    "latents_std": [2.0] * 16,
}
NARROW_VIDEO = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
COGVIDEO = {**NARROW_VIDEO, "invert_scale_latents": True, "scaling_factor": 4.0}
NARROW_LTX = {
    "layers_per_block": (1,) * 5,
    "latent_channels": 8,
    "block_out_channels": (8,) * 4,
    "decoder_block_out_channels": (8,) * 4,
    "decoder_layers_per_block": (1,) * 5,
}
NARROW_LTX_2 = {
    **NARROW_LTX,
    "block_out_channels": (8, 16, 32, 64),
    "decoder_block_out_channels": (8, 16, 32),
    "decoder_layers_per_block": (1,) * 4,
}
NARROW_MOCHI = {
    "encoder_block_out_channels": (32,) * 4,
    "decoder_block_out_channels": (32,) * 4,
    "layers_per_block": (1,) * 5,
}
UNIT = {"latents_mean": (0.0,) * 8, "latents_std": (1.0,) * 8}


@dataclass(frozen=True)
class Vae:
    """A narrow VAE of some class, and the shape and identity of its latents."""

    class_name: str
    config: dict[str, Any]
    factor: int
    channels: int
    scale: dict[str, Any] = field(default_factory=dict)
    """Some values of the identity's normalisation."""
    folds: bool = False
    has_posterior: bool = True
    cells: int = 1
    """Side, in cells, of the square that its diffusion models take as one."""

    def __str__(self) -> str:
        return self.class_name.removeprefix("Autoencoder")

    def save(self, folder: Path) -> Any:
        """Save and return a model with random weights, none at its initial value."""
        torch.manual_seed(0)
        vae = getattr(diffusers, self.class_name)(**self.config).eval().requires_grad_(False)
        for name, weight in vae.named_parameters():
            if weight.dim() == 1 or name.endswith("gamma"):
                weight.normal_(mean=float("norm" in name and not name.endswith("bias")), std=0.2)
        vae.save_pretrained(folder)
        return vae


KL_SCALE = {"latents_shift": 0.5, "latents_scale": 0.18215, "latents_mean": ()}
KL = Vae("AutoencoderKL", {**NARROW_KL, "shift_factor": 0.5}, 4, 4, KL_SCALE)
IMAGE_VAES = [
    KL,
    Vae("AutoencoderKLFlux2", {**NARROW_KL, "latent_channels": 3}, 4, 3, {"latents_patch": 2}, cells=2),
    Vae("AutoencoderDC", NARROW_DC, 4, 4, {"latents_scale": 0.41407}, has_posterior=False),
    Vae("AutoencoderTiny", NARROW_TINY, 8, 4, has_posterior=False),
    Vae("AutoencoderKLWan", PATCHED_WAN, 16, 16, folds=True),
    Vae("AutoencoderKLQwenImage", NARROW_WAN, 8, 16, folds=True, cells=2),
    Vae("AutoencoderKLCosmos", NARROW_COSMOS, 8, 4, {"latents_scale": 0.5}, folds=True, has_posterior=False),
    Vae("AutoencoderKLQwenImage21", NARROW_21, 16, 3, {"latents_std": (2.0,) * 3}, folds=True, cells=2),
]
VIDEO_VAES = [
    Vae("AutoencoderKLHunyuanVideo", NARROW_VIDEO, 8, 4, {"latents_scale": 0.476986}, folds=True),
    Vae("AutoencoderKLLTXVideo", NARROW_LTX, 32, 8, UNIT, folds=True),
    Vae("AutoencoderKLLTX2Video", NARROW_LTX_2, 32, 8, UNIT, folds=True),
    Vae("AutoencoderKLMochi", NARROW_MOCHI, 8, 12, folds=True),
    Vae("AutoencoderKLCogVideoX", COGVIDEO, 8, 4, {"latents_scale": 0.25}, folds=True),
]
VAES = IMAGE_VAES + VIDEO_VAES


@pytest.fixture(params=[*first_and_slow(IMAGE_VAES), *first_and_slow(VIDEO_VAES)], ids=[*map(str, VAES)])
def kind(request: pytest.FixtureRequest) -> Vae:
    kind: Vae = request.param
    return kind


def is_video(vae: Any) -> bool:
    return "QwenImage" in type(vae).__name__ or any(isinstance(each, torch.nn.Conv3d) for each in vae.modules())


@torch.inference_mode()
def encode_by_diffusers(vae: Any, images_N1YX3: Tensor) -> Any:
    """Return the posterior, or the latents of a VAE without one."""
    pixels = signed(images_N1YX3)
    if vae.config.get("in_channels") == 4:
        pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1)
    (encoded,) = vae.encode(pixels.unsqueeze(2) if is_video(vae) else pixels, return_dict=False)
    return encoded


def test_latents_are_diffusers_own(kind, tmp_path):
    """Mean and moments; the reference's are diffusers' to the bit, and its identity says so."""
    images = photos(64, 96)
    theirs = encode_by_diffusers(kind.save(tmp_path), images)
    size = 64 // kind.factor, 96 // kind.factor
    kept = {"mean": theirs.mean, "moments": torch.cat([theirs.mean, theirs.logvar], 1)} if kind.has_posterior else {}
    for posterior, expected in kept.items() or [("mean", getattr(theirs, "parameters", theirs))]:
        encoder = load(tmp_path, posterior=posterior)
        latents, expected = encoder.encode(images), expected.reshape(2, -1, *size)
        torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5 if kind.folds else 0)
        assert latents.std() > 0.01
        assert latents.shape[1:] == shape_of(encoder, 64, 96)
        reference = load_reference(EncoderConfig(model=str(tmp_path), posterior=posterior), image_recipe())
        assert torch.equal(reference.encode(images), expected)
        assert (encoder.identity.path, reference.identity.path) == ("folded" if kind.folds else "native", "native")
        assert encoder.identity.weights_sha256 == reference.identity.weights_sha256
        assert encoder.identity.posterior == (posterior if kind.has_posterior else "none")
        assert encoder.identity.class_name == kind.class_name


def test_a_decoder_is_diffusers_own_and_the_identity_has_the_normalisation_of_its_transformer(kind, tmp_path):
    vae, encoder = kind.save(tmp_path), load(tmp_path)
    identity = encoder.identity
    assert {name: getattr(identity, name) for name in kind.scale} == kind.scale
    assert len(identity.latents_mean) in (0, kind.channels * identity.latents_patch**2)
    latents = encoder.encode(photos(64, 96))
    decode, digest = load_decoder(EncoderConfig(model=str(tmp_path), device="cpu"))
    pictures = decode(latents)
    assert pictures.shape == (2, 3, 64, 96)
    assert digest == identity.weights_sha256
    frames = latents.unsqueeze(2) if is_video(vae) else latents
    with torch.inference_mode():
        first = vae.decode(frames[:1], return_dict=False)[0][:, :3]
    assert torch.equal(pictures[:1], first.reshape(1, 3, 64, 96))


def test_a_size_that_is_no_multiple_is_refused_unloaded(kind, tmp_path):
    kind.save(tmp_path)
    multiple = kind.factor * kind.cells
    width = multiple * 3 + kind.factor // 2
    for refuse in (partial(shape_of, load(tmp_path)), partial(refuse_image_size, EncoderConfig(model=str(tmp_path)))):
        with pytest.raises(ConfigError, match=f"{multiple}.*96x{width}"):
            refuse(96, width)


@pytest.mark.parametrize(("channels", "multiple"), [(16, 16), (4, 8)])
def test_vaes_of_16_channels_are_taken_by_2_x_2_cells(tmp_path, channels, multiple):
    """They are those of FLUX.1 and SD3."""
    config = {"_class_name": "AutoencoderKL", "block_out_channels": [8] * 4, "latent_channels": channels}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"{multiple}.*20x40"):
        refuse_image_size(EncoderConfig(model=str(tmp_path)), 20, 40)


# Clips' latents are diffusers' own, too, and a rule says which part of them is exact.
# Axes: N clips, T frames, Y X pixels.

WAN_21 = Vae("AutoencoderKLWan", NARROW_WAN, 8, 16)
WAN_22 = Vae("AutoencoderKLWan", PATCHED_WAN, 16, 16)
HUNYUAN, LTX, LTX_2, MOCHI, COGVIDEOX = VIDEO_VAES
LTX_NOT_CAUSAL = replace(LTX, config={**LTX.config, "encoder_causal": False})
CLIP_KINDS = {
    "Wan 2.1": WAN_21,
    "Wan 2.2": WAN_22,
    "LTX, not causal": LTX_NOT_CAUSAL,
    **{str(each): each for each in VIDEO_VAES},
}
STEPS = {LTX.class_name: 8, LTX_2.class_name: 8, MOCHI.class_name: 6, COGVIDEOX.class_name: 8}
"""A clip has one frame more than a multiple of this, or of 4; except for CogVideoX, it is one latent frame."""
HEIGHT, WIDTH = 32, 64


class Loaded:
    def __init__(self, kind, folder):
        self.kind, self.model, self.diffusers = kind, str(folder), kind.save(folder)
        self.encoder = load_clips(self.model)
        self.step = STEPS.get(kind.class_name, 4)
        self.factor = 4 if kind is COGVIDEOX else self.step

    def lengths(self):
        """Return numbers of frames of clips, up to 50."""
        return [1 + k * self.step for k in (1, 2, 3, 4, 48 // self.step)]

    @torch.inference_mode()
    def by_diffusers(self, clips_NTYX3):
        pixels = clips_NTYX3.permute(0, 4, 1, 2, 3).float() / 127.5 - 1
        return self.diffusers.encode(pixels).latent_dist.mode()


load_clips = partial(load, clip=CLIP)


def clips_of(frames: int, number: int = 1, height: int = HEIGHT) -> Tensor:
    return photos(height, WIDTH, number, frames)


@pytest.fixture(scope="module", params=first_and_slow(CLIP_KINDS.values()), ids=CLIP_KINDS)
def loaded(request, tmp_path_factory) -> Loaded:
    return Loaded(request.param, tmp_path_factory.mktemp("vae"))


def assert_equal(latents: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(latents, expected, rtol=0, atol=atol)


def test_latents_and_moments_of_clips_are_diffusers_own(loaded):
    """And of the shape that the layout says. No encode path is folded."""
    assert loaded.encoder.identity.path == "native"
    moments = load_clips(loaded.model, posterior="moments")
    for frames in (1, *loaded.lengths()[:3]):
        latents, layout = loaded.encoder.encode(clips_of(frames)), loaded.encoder.array(Size(frames, HEIGHT, WIDTH))
        mean, logvar = moments.encode(clips_of(frames)).chunk(2, dim=1)
        for each in (latents, mean):
            assert_equal(each, loaded.by_diffusers(clips_of(frames)))
        assert (logvar != mean).any()
        assert shape_of(moments, HEIGHT, WIDTH, frames) == (2 * mean.shape[1], *mean.shape[2:])
        assert latents.std() > 0.01
        sides = 1 + (frames - 1) // loaded.factor, HEIGHT // loaded.kind.factor, WIDTH // loaded.kind.factor
        assert latents.shape[1:] == layout.shape == (loaded.kind.channels, *sides)
        assert layout.axes == ("channel", "latent_t", "latent_y", "latent_x")


def test_the_prefix_alone_has_the_clips_own_latent_frames(loaded):
    """At least two of them, but for a single frame."""
    assert loaded.encoder.prefix(clips_of(1))[1] == 1
    for length in loaded.lengths():
        clip = clips_of(length)
        first, same = loaded.encoder.prefix(clip)
        frames = first.shape[1]
        assert 2 <= same <= 1 + (frames - 1) // loaded.factor
        assert frames <= length
        prefix, whole = loaded.encoder.encode(first), loaded.encoder.encode(clip)
        assert_equal(prefix[:, :, :same], whole[:, :, :same], atol=2e-5)


def test_other_numbers_of_frames_are_refused_with_the_nearest(loaded):
    below = 1 + 2 * loaded.step
    for frames in range(below + 1, below + loaded.step):
        with pytest.raises(ConfigError, match=rf"clip.frames .*{loaded.step}k.*{frames}.*{below} "):
            shape_of(loaded.encoder, HEIGHT, WIDTH, frames)


def test_a_decoder_gives_diffusers_own_clips(loaded):
    decode, digest = load_decoder(EncoderConfig(model=loaded.model, device="cpu"))
    latents = loaded.encoder.encode(clips_of(1 + loaded.step, height=64))
    with torch.inference_mode():
        assert_equal(decode(latents), loaded.diffusers.decode(latents).sample)
    assert digest == loaded.encoder.identity.weights_sha256


def test_clips_of_cogvideox_1_5_are_scaled_as_videos_not_as_first_images(tmp_path):
    """Diffusers multiplies videos by the scale; `invert_scale_latents` is of the image that a video begins with."""
    COGVIDEOX.save(tmp_path)
    still, clips = load(tmp_path), load_clips(tmp_path)
    assert (clips.identity.latents_scale, still.identity.latents_scale) == (4.0, 0.25)
    assert clips.identity.weights_sha256 == still.identity.weights_sha256
