"""How many pixels of a side make one latent cell: known from a model's config.json, before its weights are read."""

from collections.abc import Callable, Mapping
from typing import Any

from cache_store.errors import ConfigError
from precompute.encoders.model_files import find_model

WAN_LEVELS = (1, 2, 4, 4)
"""diffusers' default `dim_mult` of AutoencoderKLWan."""


def wan_spatial_factor(config: Mapping[str, Any]) -> int:
    """Sides are halved between levels; the residual form also cuts the image into patches."""
    factor: int = 2 ** (len(config.get("dim_mult", WAN_LEVELS)) - 1) * (config.get("patch_size") or 1)
    return factor


SPATIAL_FACTORS: dict[str, Callable[[Mapping[str, Any]], int]] = {"AutoencoderKLWan": wan_spatial_factor}
"""By diffusers class."""


def refuse_unfit(height: int, width: int, factor: int) -> None:
    """Raise ConfigError for a size that an encoder would have to crop."""
    if height < 1 or width < 1 or height % factor or width % factor:
        raise ConfigError(f"image.height and image.width must be multiples of {factor}, got {height}x{width}")


def refuse_unfit_for(model: str, height: int, width: int) -> None:
    """Raise ConfigError for a size that the encoder of `model` would have to crop; a broken config passes here."""
    files = find_model(model)
    try:
        factor = SPATIAL_FACTORS[files.class_name](files.config)
    except (KeyError, TypeError):
        return  # loading the model will say what is wrong with it
    refuse_unfit(height, width, factor)
