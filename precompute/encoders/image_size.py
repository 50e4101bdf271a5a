"""Which image sizes an encoder takes: known from a model's config.json, before its weights are read."""

from collections.abc import Callable, Mapping
from typing import Any

from cache_store.errors import ConfigError
from precompute.encoders.model_files import find_model

WAN_LEVELS = (1, 2, 4, 4)
"""diffusers' default `dim_mult` of AutoencoderKLWan."""

SIGLIP_SIDE = 224
"""transformers' default `image_size` of a SigLIP vision tower, which config.json leaves out where it is that."""


def wan_spatial_factor(config: Mapping[str, Any]) -> int:
    """Pixels of a latent cell's side: halved between levels; the residual form also cuts the image into patches."""
    factor: int = 2 ** (len(config.get("dim_mult", WAN_LEVELS)) - 1) * (config.get("patch_size") or 1)
    return factor


def refuse_unfit(height: int, width: int, factor: int) -> None:
    """Raise ConfigError for a size that an encoder would have to crop."""
    if height < 1 or width < 1 or height % factor or width % factor:
        raise ConfigError(f"image.height and image.width must be multiples of {factor}, got {height}x{width}")


def refuse_other_side(height: int, width: int, side: int) -> None:
    """Raise ConfigError for a size that a tower has no positions for."""
    if (height, width) != (side, side):
        raise ConfigError(
            f"image.height and image.width must be {side}, as the tower was trained, got {height}x{width}"
        )


def refuse_for_wan(config: Mapping[str, Any], height: int, width: int) -> None:
    refuse_unfit(height, width, wan_spatial_factor(config))


def refuse_for_siglip(config: Mapping[str, Any], height: int, width: int) -> None:
    refuse_other_side(height, width, int(config.get("image_size", SIGLIP_SIDE)))


def refuse_for_siglip_within(config: Mapping[str, Any], height: int, width: int) -> None:
    refuse_for_siglip(config["vision_config"], height, width)


REFUSALS: dict[str, Callable[[Mapping[str, Any], int, int], None]] = {
    "AutoencoderKLWan": refuse_for_wan,
    "SiglipVisionModel": refuse_for_siglip,
    "SiglipModel": refuse_for_siglip_within,
    "Gemma3ForConditionalGeneration": refuse_for_siglip_within,
}
"""By class, as config.json names it."""


def refuse_unfit_for(model: str, height: int, width: int) -> None:
    """Raise ConfigError for a size that the encoder of `model` does not take; a broken config passes here."""
    files = find_model(model)
    try:
        REFUSALS[files.class_name](files.config, height, width)
    except (AttributeError, LookupError, TypeError, ValueError):
        return  # loading the model will say what is wrong with it
