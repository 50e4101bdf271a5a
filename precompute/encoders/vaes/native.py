"""The family of a VAE that diffusers itself runs; torch and diffusers are imported when one is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder, PixelRange
from precompute.encoders.family import Family, refuse_unfit
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.vaes.kind import Config, VaeKind

if TYPE_CHECKING:
    import torch

    from precompute.encoders.family import Decoder


def native_family(kind: VaeKind) -> Family:
    """The family of this kind."""

    def load(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
        from precompute.encoders.vaes.diffusers_vae import load_native
        from precompute.encoders.vaes.vae import VaeEncoder

        return VaeEncoder(load_native(files, kind, config), config, pixel_range)

    def load_decoder(files: ModelFiles, device: torch.device) -> Decoder:
        from precompute.encoders.vaes import diffusers_vae

        return diffusers_vae.load_decoder(files, kind, device)

    def refuse_size(config: Config, height: int, width: int) -> None:
        refuse_unfit(height, width, kind.spatial_factor(config) * kind.cells)

    takes = ("posterior",) if kind.has_posterior else ()
    return Family(load=load, refuse_size=refuse_size, takes=takes, load_decoder=load_decoder)
