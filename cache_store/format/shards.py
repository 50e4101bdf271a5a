"""The interface of a shard format, which only lays out bytes; hashing and publishing happen elsewhere."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.format.array import ArraySpec, CodecName, StoreDtype
from cache_store.format.quantized import Scale
from cache_store.format.schema import Spec


class Location(NamedTuple):
    """The place of an encoded sample in its shard file, and the crc32c over those bytes."""

    offset: int
    length: int
    crc32c: int


NOWHERE = (-1, -1, -1)
"""The place of an absent row, in an array of places."""


@dataclass(frozen=True)
class ShardSamples:
    """The samples of one shard, as listed in its samples table."""

    spec: Spec
    shard: int
    table: pa.Table
    planned: pa.Table | None
    """The shard's rows of the plan; None unless they are known to be sound."""

    @property
    def array(self) -> ArraySpec:
        return self.spec.array_of(self.shard)

    @property
    def rows(self) -> range:
        """Row numbers that the table must cover."""
        return self.spec.shard_rows(self.shard)

    @cached_property
    def locations(self) -> list[Location | None]:
        columns = [self.table[name].to_pylist() for name in Location._fields]
        return [None if None in values else Location(*values) for values in zip(*columns, strict=True)]

    @cached_property
    def scale(self) -> Scale | None:
        """The scale of quantized samples, [rows, C], NaN where a row has none; None if values are stored."""
        if not self.array.is_quantized:
            return None
        absent = [np.nan] * self.array.features
        columns = (self.table[name].to_pylist() for name in Scale._fields)
        return Scale(*(np.array([values or absent for values in column], np.float32) for column in columns))


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """The next rows of a shard, in order."""

    kept: NDArray[np.bool_]
    """[N]; False leaves a row absent."""
    payloads: Sequence[bytes | memoryview]
    """Encoded samples of the kept rows."""
    checksums: NDArray[np.uint32]
    """crc32c of each payload."""
    contents: Sequence[str | None]
    """SHA-256 of each row's image or text, [N]."""
    tokens: Sequence[int | None]
    """Number of tokens of each row's text before it was cut, [N]; None for an image or clip."""


class ShardWriter(Protocol):
    def append(self, rows: EncodedRows) -> NDArray[np.int64]:
        """Add the next rows; return their places [N, 3]: offset, length and crc32c, or -1 for an absent row."""

    def finish(self) -> None:
        """Write the bytes that follow the last sample."""


class ShardFormat(Protocol):
    """The layout of the shards of one cache."""

    def __init__(self, spec: Spec) -> None: ...

    @staticmethod
    def unsupported(dtype: StoreDtype, codec: CodecName) -> str | None:
        """Say why the format cannot hold such an array and which can, or return None."""

    def shard_file(self, shard: int) -> str:
        """Name of a shard's file, relative to the cache."""

    def writer(self, stream: BinaryIO, shard: int, planned: pa.Table) -> ShardWriter:
        """Make a writer for a shard, whose plan rows are `planned`."""

    def metadata(self) -> dict[str, bytes]:
        """Return the contents of every metadata file by name; they depend on the spec alone."""

    def proof(self, data: memoryview, locations: Sequence[Location | None]) -> int:
        """Return the crc32c over those bytes of a shard file that show which shard it is, a few KB and one sample."""

    def structure_problems(self, data: memoryview, samples: ShardSamples) -> Iterator[tuple[int | None, str]]:
        """Yield where a shard file's structure differs from its samples table: (slot or None, problem)."""
