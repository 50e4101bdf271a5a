"""The options of `copy` and `withdraw`. Imports little: a help shows them."""

from dataclasses import dataclass, field

from cache_store.format.array import CodecName
from cache_store.format.schema import StoreFormat


@dataclass(frozen=True, kw_only=True)
class CopyConfig:
    """The form of the copy."""

    format: StoreFormat | None = None
    """zarr: one Zarr v3 shard file per shard. webdataset: one uncompressed tar per shard. Default: the cache's own."""
    codec: CodecName | None = None
    """Codec of the copy's samples; by default that of the cache, or none for tars, which support no other."""


@dataclass(frozen=True, kw_only=True)
class WithdrawConfig:
    """Take samples out of sealed caches."""

    ids: str = field(metadata={"option": "--ids FILE"})
    """A text file with the ids of the samples as the plan has them, one a line; one with a line break as JSON text."""
