"""What a build is made of: config and request, the opened store, source and encoder, and the recipe that they give."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from cache_store.format.array import Size
from cache_store.format.schema import Recipe, SizedArray
from cache_store.storage.store import Store
from precompute.build.request import BuildRequest
from precompute.config import BuildConfig
from precompute.inputs import Reader, make_reader
from precompute.inputs.arrange import Arrange, BySize, Order, in_order
from precompute.recipe import recipe_of
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
