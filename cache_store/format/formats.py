"""Choosing a shard format by its name."""

from cache_store.format.layout import ShardFormat
from cache_store.format.schema import Spec, StoreFormat
from cache_store.format.tar import TarFormat
from cache_store.format.zarr import ZarrFormat

FORMATS: dict[StoreFormat, ShardFormat] = {"zarr": ZarrFormat(), "webdataset": TarFormat()}


def shard_format(spec: Spec) -> ShardFormat:
    return FORMATS[spec.store_format]
