"""What a build is made of: config and request, the opened store, source and encoder, and the recipe that they give."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from cache_store.errors import ConfigError
from cache_store.format.array import ArrayRecipe, SampleAxes, Size
from cache_store.format.record import FORMAT_VERSION
from cache_store.format.schema import Recipe, SizedArray
from cache_store.storage.store import Store
from precompute.build.request import BuildRequest
from precompute.config import BuildConfig
from precompute.inputs import Reader, make_reader
from precompute.inputs.arrange import Arrange, BySize, Order, in_order
from precompute.sources.images import Source

if TYPE_CHECKING:
    from precompute.encoders.encoder import Encoder  # with torch, which no decision needs


ORDERS: dict[str, Order] = {"cache": "plan", "parquet": "source"}
"""The order of rows by kind of source; a row group of a Parquet file is read whole, so its rows stay together."""


@dataclass(frozen=True, kw_only=True)
class BuildInputs:
    """One build's config and request, with its opened store, source and encoder."""

    config: BuildConfig
    request: BuildRequest
    store: Store
    source: Source
    encoder: "Encoder"

    @cached_property
    def recipe(self) -> Recipe:
        return recipe_of(self.config, self.encoder)

    @cached_property
    def reader(self) -> Reader:
        texts, threads = self.encoder.texts, self.config.run.threads(1)
        return make_reader(self.source, self.recipe.array, texts, clips=self.config.clip, threads=threads)

    def array_of(self, size: Size) -> SizedArray:
        """Raise ConfigError if the encoder cannot take samples of the size."""
        return SizedArray(size=size, shape=self.encoder.array(size).shape)


def make_arranger(inputs: BuildInputs) -> Arrange:
    config, rows = inputs.config, inputs.recipe.samples_per_shard
    if len(sizes := config.example_sizes) == 1:
        return partial(in_order, sizes[0], rows)
    order = ORDERS.get(config.source.kind, "aspect")
    return BySize(inputs.recipe.array.images.rule, rows, inputs.reader, inputs.array_of, order, sizes[0])


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
