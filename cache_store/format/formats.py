"""The shard formats by name."""

from cache_store.format.layout import NULL_TEXT_FILE, samples_file
from cache_store.format.schema import Spec, StoreFormat
from cache_store.format.shards import ShardFormat
from cache_store.format.tar import TarFormat
from cache_store.format.zarr import ZarrFormat

FORMATS: dict[StoreFormat, type[ShardFormat]] = {"zarr": ZarrFormat, "webdataset": TarFormat}


def shard_format(spec: Spec) -> ShardFormat:
    return FORMATS[spec.store_format](spec)


def files_of_shard(spec: Spec, shard: int) -> tuple[str, ...]:
    """Return the names of a shard's files: shard file, samples table, and in the first one of texts the null prompt."""
    null = (NULL_TEXT_FILE,) if shard == 0 and spec.array.text else ()
    return shard_format(spec).shard_file(shard), samples_file(shard), *null
