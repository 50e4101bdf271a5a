"""What a shard format must do: lay out bytes. Naming, hashing and publishing happen outside it."""

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, Protocol

from cache_store.schema import Spec


class Location(NamedTuple):
    """Where an encoded sample lies in its shard file, and the crc32c over those bytes."""

    offset: int
    length: int
    crc32c: int


class ShardWriter(Protocol):
    def append(self, payload: bytes | None) -> Location | None:
        """Add the next row's encoded sample; None leaves the row absent."""

    def finish(self) -> None:
        """Write what follows the last sample."""


class ShardFormat(Protocol):
    def shard_file(self, array: str, shard: int) -> str:
        """Name of a shard's file, relative to the cache."""

    def writer(self, stream: BinaryIO, capacity: int) -> ShardWriter: ...

    def metadata(self, spec: Spec) -> dict[str, bytes]:
        """Contents of every metadata file by name, as functions of the spec alone."""

    def structure_problems(
        self, shard: memoryview, capacity: int, locations: list[Location | None]
    ) -> Iterator[tuple[int | None, str]]:
        """Disagreements between a shard's own structure and the samples table: (slot or None, problem)."""


def shard_format(spec: Spec) -> ShardFormat:
    from cache_store.zarr_shard import ZarrFormat  # the formats import this module's types

    return {"zarr": ZarrFormat()}[spec.store_format]
