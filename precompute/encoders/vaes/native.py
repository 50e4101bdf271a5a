"""The family of VAEs that diffusers itself runs; torch and diffusers are imported when one is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder, PixelRange
from precompute.encoders.family import Family, refuse_unfit
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.vaes.kind import Config, VaeKind

if TYPE_CHECKING:
    import torch

    from precompute.encoders.family import Decoder


def native_family(kinds: Mapping[str, VaeKind]) -> Family:
    """The family of these kinds, by class."""

    def load(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
        from precompute.encoders.vaes.diffusers_vae import load_native
        from precompute.encoders.vaes.vae import VaeEncoder

        return VaeEncoder(load_native(files, kinds[files.class_name], config), config, pixel_range)

    def load_decoder(files: ModelFiles, device: torch.device) -> Decoder:
        from precompute.encoders.vaes import diffusers_vae

        return diffusers_vae.load_decoder(files, kinds[files.class_name], device)

    def refuse_size(config: Config, height: int, width: int) -> None:
        kind = kinds[config["_class_name"]]
        refuse_unfit(height, width, kind.spatial_factor(config) * kind.cells)

    takes = ("posterior",) if any(kind.has_posterior for kind in kinds.values()) else ()
    return Family(load=load, refuse_size=refuse_size, takes=takes, load_decoder=load_decoder)
