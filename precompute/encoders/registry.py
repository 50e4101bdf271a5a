"""Which encoder classes are known, and functions that load the encoder or the decoder of any of them.

A new encoder is a module with a loader from model files to an `Encoder`, for a VAE one with a loader of its decoder,
a line in `FAMILIES`, and one in `REFUSALS` of `image_size.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cache_store.errors import ConfigError, ModelError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder, PixelRange
from precompute.encoders.model_files import ModelFiles, find_model


@dataclass(frozen=True)
class Family:
    """How models of one class are loaded."""

    encoder: Callable[[ModelFiles, EncoderConfig, PixelRange], Encoder]
    decoder: Callable[[ModelFiles, torch.device], tuple[Callable[[Tensor], Tensor], str]] | None = None
    """The decoder, if there is one, and the SHA-256 of the encode path that its weights came with."""
    meaningless: tuple[str, ...] = ()
    """Fields of `EncoderConfig` that are for other encoders."""


def wan() -> Family:
    """Import late; and the decoder later, as diffusers takes seconds, which no build of folded encoders needs."""
    from precompute.encoders.vaes.vae import VaeEncoder
    from precompute.encoders.vaes.wan import load_wan

    def encoder(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
        return VaeEncoder(load_wan(files, config), config, pixel_range)

    def decoder(files: ModelFiles, device: torch.device) -> tuple[Callable[[Tensor], Tensor], str]:
        from precompute.encoders.vaes.wan_diffusers import load_wan_decoder

        return load_wan_decoder(files, device)

    return Family(encoder, decoder, meaningless=("pool",))


def siglip() -> Family:
    """Import late: transformers takes seconds, and a wrong config or source is reported before that."""
    from precompute.encoders.towers.siglip import load_siglip
    from precompute.encoders.towers.tower import TowerEncoder

    def encoder(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
        return TowerEncoder(load_siglip(files, config), config, pixel_range)

    return Family(encoder, meaningless=("posterior", "fold", "compile"))


FAMILIES: dict[str, Callable[[], Family]] = {
    "AutoencoderKLWan": wan,
    "SiglipVisionModel": siglip,
    "SiglipModel": siglip,
    "Gemma3ForConditionalGeneration": siglip,
}
"""Class of diffusers or transformers, as a model's config.json names it, to its loaders."""


def find_family(model: str) -> tuple[Family, ModelFiles]:
    """Find the files of a hub id or folder and what loads them; ModelError for an unknown class."""
    files = find_model(model)
    if files.class_name not in FAMILIES:
        raise ModelError(
            f"encoder.model {model} is of class {files.class_name}; known are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[files.class_name](), files


def load_encoder(config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
    """The frozen encoder that `config` names, ready on its device; pixels enter it in `pixel_range`."""
    family, files = find_family(config.model)
    config.refuse_meaningless(family.meaningless, files.class_name)
    return family.encoder(files, config, pixel_range)


def load_reference(config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
    """The encoder of the same weights in float32 on a CPU, by the path of the library that the model is of."""
    family, files = find_family(config.model)
    reference = replace(config, device="cpu", compute_dtype="float32", compile=False)
    try:
        return family.encoder(files, replace(reference, fold=False).without(family.meaningless), pixel_range)
    except ConfigError:  # diffusers cannot run it
        return family.encoder(files, reference.without(family.meaningless), pixel_range)


def load_decoder(config: EncoderConfig) -> tuple[Callable[[Tensor], Tensor], str]:
    """The decoder of the model that `config` names, and the SHA-256 of its encode path."""
    family, files = find_family(config.model)
    if family.decoder is None:
        raise ModelError(f"encoder.model {config.model} is of class {files.class_name}, which has no decoder")
    return family.decoder(files, config.torch_device)
