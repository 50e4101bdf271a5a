"""The recipe and the spec of the cache that a config asks for."""

import msgspec

from cache_store.cache.metadata import spec_problems
from cache_store.errors import ConfigError
from cache_store.format.record import FORMAT_VERSION
from cache_store.format.schema import ArraySpec, Recipe, Spec
from precompute.config import BuildConfig
from precompute.encoders.encoder import Encoder, TextEncoder


def recipe_of(config: BuildConfig, encoder: Encoder) -> Recipe:
    array = ArraySpec(
        **msgspec.structs.asdict(encoder.layout(config.image.height, config.image.width)),
        dtype=config.store.dtype,
        codec=config.store.codec,
        image=None if isinstance(encoder, TextEncoder) else config.image.recipe,
        text=encoder.recipe if isinstance(encoder, TextEncoder) else None,
        encoder=encoder.identity,
    )
    return Recipe(
        format_version=FORMAT_VERSION,
        store_format=config.store.format,
        samples_per_shard=config.store.samples_per_shard,
        array=array,
    )


def possible_spec(recipe: Recipe, rows: int, plan_digest: str) -> Spec:
    """The spec of a cache of that plan; ConfigError, before anything is written, where no cache can be so."""
    spec = recipe.spec(rows, plan_digest)
    if problems := spec_problems(spec):
        raise ConfigError(f"no cache can hold {rows:,} samples of this size: {'; '.join(problems)}")
    return spec
