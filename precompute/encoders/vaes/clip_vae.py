"""A frozen VAE as an encoder of clips, which diffusers itself runs, one clip at a time."""

# Axes: N clips, T frames, Y X pixels, C latent channels, H W latent cells.

from dataclasses import replace

import torch
from torch import Tensor

from cache_store.errors import ConfigError
from cache_store.format.array import SampleLayout
from precompute.encoders.encoder import PixelRange, clip_pixels, images_alone
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.vaes.diffusers_vae import load_native
from precompute.encoders.vaes.kind import ClipRule, VaeKind
from precompute.encoders.vaes.vae import FrozenVae, VaeEncoder


class ClipVaeEncoder(VaeEncoder):
    """Maps uint8 RGB clips, and images, to latents, on one device."""

    def __init__(self, vae: FrozenVae, rule: ClipRule, config: EncoderConfig, pixel_range: PixelRange) -> None:
        super().__init__(vae, config, pixel_range)
        self._rule = rule

    def clip_layout(self, frames: int, height: int, width: int) -> SampleLayout:
        """Describe a sample [C, T, H, W] of a clip."""
        image, rule = self.layout(height, width), self._rule
        if frames % rule.step != 1 % rule.step:
            below = (frames - 1) // rule.step * rule.step + 1
            raise ConfigError(
                f"clip.frames must be {rule.step}k + 1 for {self._vae.class_name}, got {frames}; the nearest are "
                f"{below} and {below + rule.step}"
            )
        channels, rows, columns = image.shape
        return SampleLayout(
            axes=("channel", "latent_t", "latent_y", "latent_x"),
            shape=(channels, 1 + (frames - 1) // rule.factor, rows, columns),
            feature_axis="channel",
            has_preview=True,
        )

    def clip_prefix(self, frames: int) -> tuple[int, int]:
        """Return how many frames of a clip to encode alone, and how many latent frames are then those of the clip.

        They are equal but for rounding: a convolution over another length may add in another order.
        """
        return self._rule.prefix(frames)

    @torch.inference_mode()
    def encode(self, image_NYX3: Tensor) -> Tensor:
        """Map uint8 RGB clips [N, T, Y, X, 3], on any device, to [N, C, T, H, W], float32, on the encoder's device.

        One clip is encoded at a time, on a GPU too: it fills one, memory does not grow with the batch, and bits do not
        depend on it. Images [N, Y, X, 3] give [N, C, H, W].
        """
        if image_NYX3.dim() == 4:
            return super().encode(image_NYX3)
        return torch.cat([self._encode_clip(clip_TYX3) for clip_TYX3 in image_NYX3])

    def _encode_clip(self, clip_TYX3: Tensor) -> Tensor:
        dtype = torch.float32 if self._vae.exact_pixels else self._dtype
        pixels_13TYX = clip_pixels(clip_TYX3, self._to_range, dtype, self.device)
        return self._kept(self._vae.network(pixels_13TYX)).float().contiguous()


def load_clips(files: ModelFiles, kind: VaeKind, config: EncoderConfig, pixel_range: PixelRange) -> ClipVaeEncoder:
    """Load the encoder; raise ConfigError, before weights are read, if the class encodes images alone."""
    if kind.clips is None:
        raise images_alone(files.class_name)
    kind = replace(kind, normalization=kind.clip_normalization or kind.normalization)
    frozen = load_native(files, kind, config)
    assert frozen.clips is not None
    return ClipVaeEncoder(frozen, frozen.clips, config, pixel_range)
