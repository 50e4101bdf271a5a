"""Clips' latents are diffusers' own, of every VAE that encodes clips, and its rule says which part of them is exact."""

# Axes: N clips, T frames, Y X pixels.

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from cache_store.errors import ConfigError
from cache_store.format.array import Size
from tests.families import first_and_slow
from tests.precompute.encoders.loading import CLIP, load, photos, shape_of
from tests.precompute.encoders.test_vaes import NARROW_WAN, PATCHED_WAN, VIDEO_VAES, Vae

WAN_21 = Vae("AutoencoderKLWan", NARROW_WAN, 8, 16)
WAN_22 = Vae("AutoencoderKLWan", PATCHED_WAN, 16, 16)
HUNYUAN, LTX, LTX_2, MOCHI, COGVIDEOX = VIDEO_VAES
LTX_NOT_CAUSAL = replace(LTX, config={**LTX.config, "encoder_causal": False})
KINDS = {
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


@pytest.fixture(scope="module", params=first_and_slow(KINDS.values()), ids=KINDS)
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


def test_clips_of_cogvideox_1_5_are_scaled_as_videos_not_as_first_images(tmp_path):
    """Diffusers multiplies videos by the scale; `invert_scale_latents` is of the image that a video begins with."""
    COGVIDEOX.save(tmp_path)
    still, clips = load(tmp_path), load_clips(tmp_path)
    assert (clips.identity.latents_scale, still.identity.latents_scale) == (4.0, 0.25)
    assert clips.identity.weights_sha256 == still.identity.weights_sha256
