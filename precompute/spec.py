"""The spec of the cache that a config asks for."""

import pyarrow as pa

from cache_store.cache.metadata import spec_problems
from cache_store.errors import ConfigError
from cache_store.format.plan import plan_digest
from cache_store.format.record import FORMAT_VERSION
from cache_store.format.schema import ArraySpec, Spec
from precompute.config import BuildConfig
from precompute.encoders.encoder import Encoder


def array_spec(config: BuildConfig, encoder: Encoder) -> ArraySpec:
    return ArraySpec(
        shape=encoder.latent_shape(config.image.height, config.image.width),
        dtype=config.store.dtype,
        codec=config.store.codec,
        image=config.image.recipe,
        encoder=encoder.identity,
    )


def spec_of(config: BuildConfig, array: ArraySpec, plan: pa.Table) -> Spec:
    """The spec of a cache that holds `plan`; ConfigError, before anything is written, where no cache can be so."""
    spec = Spec(
        format_version=FORMAT_VERSION,
        store_format=config.store.format,
        rows=plan.num_rows,
        samples_per_shard=config.store.samples_per_shard,
        plan_digest=plan_digest([plan]),
        array=array,
    )
    if problems := spec_problems(spec):
        raise ConfigError(f"no cache can hold {plan.num_rows:,} samples of this size: {'; '.join(problems)}")
    return spec
