"""The recipe of a cache: everything in its config and its encoder that changes a byte."""

from typing import TYPE_CHECKING

from cache_store.errors import ConfigError
from cache_store.format.array import ArrayRecipe, SampleAxes
from cache_store.format.record import FORMAT_VERSION
from cache_store.format.schema import Recipe
from precompute.config import BuildConfig

if TYPE_CHECKING:
    from precompute.encoders.encoder import Encoder  # with torch, which no decision needs


def recipe_of(config: BuildConfig, encoder: "Encoder") -> Recipe:
    """Raise ConfigError for a size or a dtype that the encoder cannot have."""
    layout, *_ = [encoder.array(size) for size in config.example_sizes]  # all must be possible
    if config.store.dtype == "uint8" and not layout.can_be_quantized:
        raise ConfigError(
            f"store.dtype uint8: it is for channels of many values each, but a sample of {config.encoder.model} is "
            f"[{layout.named(layout.shape)}]; take float16"
        )
    array = ArrayRecipe(
        **{name: getattr(layout, name) for name in SampleAxes.__struct_fields__},
        features=layout.num_features,
        dtype=config.store.dtype,
        codec=config.store.codec,
        image=config.image_recipe,
        text=config.source.recipe(encoder.texts.recipe) if encoder.texts else None,
        encoder=encoder.identity,
    )
    return Recipe(
        format_version=FORMAT_VERSION,
        store_format=config.store.format,
        samples_per_shard=config.store.samples_per_shard,
        array=array,
    )
