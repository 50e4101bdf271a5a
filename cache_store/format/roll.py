"""shards.bin: what each shard of a sealed cache is, in 64 bytes; readers map it in place of reading every record."""

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cache_store.errors import CacheError
from cache_store.format.schema import CommitContent, Spec

ENTRY = np.dtype(
    [
        ("part", "<u4"),
        ("array", "<u4"),
        ("rows", "<u4"),
        ("cached", "<u4"),
        ("withdrawn", "<u4"),
        ("proof", "<u4"),
        ("bytes", "<u8"),
        ("content", "V32"),
    ]
)
"""An entry: numbers of the shard's part and array, counts of its rows, `proof` and `bytes` of its file as in its
record, and the digest of the record's content."""


class Roll:
    """What each shard is: the contents of shards.bin."""

    def __init__(self, data: bytes | memoryview) -> None:
        if len(data) % ENTRY.itemsize:
            raise CacheError(f"is {len(data):,} bytes, not {ENTRY.itemsize} for each shard")
        self.data, self.entries = data, np.frombuffer(data, ENTRY)

    @classmethod
    def of(cls, spec: Spec, contents: Iterable[CommitContent]) -> "Roll":
        """Make it from the content of each shard's record, in order."""
        entries = np.zeros(spec.num_shards, ENTRY)
        entries["part"], entries["array"] = spec.part_of_shard, spec.array_indices
        entries["rows"] = np.diff(spec.bounds)
        for entry, each in zip(entries, contents, strict=True):
            entry["cached"], entry["withdrawn"], entry["proof"] = each.cached, each.withdrawn, each.proof
            entry["bytes"], entry["content"] = each.files[0].bytes, bytes.fromhex(each.digest)
        return cls(entries.tobytes())

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def cached(self) -> NDArray[np.int64]:
        return self.entries["cached"].astype(np.int64)

    def digest(self, shard: int) -> str:
        digest: bytes = self.entries["content"][shard].tobytes()
        return digest.hex()

    def holds(self, shard: int, content: CommitContent) -> bool:
        return shard < len(self) and self.digest(shard) == content.digest
