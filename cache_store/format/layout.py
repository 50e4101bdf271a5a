"""What a shard format must do: lay out bytes. Naming, hashing and publishing happen outside it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.format.schema import CodecName, Spec, StoreDtype


class Location(NamedTuple):
    """Where an encoded sample lies in its shard file, and the crc32c over those bytes."""

    offset: int
    length: int
    crc32c: int


NOWHERE = (-1, -1, -1)
"""In an array of places, where a row is absent."""


@dataclass(frozen=True)
class ShardSamples:
    """The samples of one shard, as its samples table has them."""

    spec: Spec
    shard: int
    table: pa.Table
    planned: pa.Table | None
    """The shard's rows of the plan; None where they are not known to be sound."""

    @property
    def rows(self) -> range:
        """The rows that the table must have."""
        return self.spec.shard_rows(self.shard)

    @cached_property
    def locations(self) -> list[Location | None]:
        columns = [self.table[name].to_pylist() for name in Location._fields]
        return [None if None in values else Location(*values) for values in zip(*columns, strict=True)]


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """The next rows of a shard, in order."""

    kept: NDArray[np.bool_]
    """[N]; False leaves a row absent."""
    payloads: Sequence[bytes | memoryview]
    """The encoded sample of each row kept: its bytes."""
    checksums: NDArray[np.uint32]
    """crc32c of each."""
    contents: Sequence[str | None]
    """SHA-256 of each row's image or text, [N]."""
    tokens: Sequence[int | None] = ()
    """Of each row's text, [N], before it was cut; none of images."""


class ShardWriter(Protocol):
    def append(self, rows: EncodedRows) -> NDArray[np.int64]:
        """Add the next rows; their places: offset, length and crc32c, [N, 3], -1 where a row is absent."""

    def finish(self) -> None:
        """Write what follows the last sample."""


class ShardFormat(Protocol):
    """How the shards of one cache are laid out."""

    def __init__(self, spec: Spec) -> None: ...

    @staticmethod
    def unsupported(dtype: StoreDtype, codec: CodecName) -> str | None:
        """Why the format cannot hold such an array and what can, or None where it can."""

    def shard_file(self, shard: int) -> str:
        """Name of a shard's file, relative to the cache."""

    def writer(self, stream: BinaryIO, planned: pa.Table) -> ShardWriter:
        """A writer of the shard whose rows of the plan are `planned`."""

    def metadata(self) -> dict[str, bytes]:
        """Contents of every metadata file by name, as functions of the spec alone."""

    def structure_problems(self, data: memoryview, samples: ShardSamples) -> Iterator[tuple[int | None, str]]:
        """Disagreements between a shard file's own structure and its samples table: (slot or None, problem)."""
