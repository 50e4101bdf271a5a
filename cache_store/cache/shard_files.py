"""The one way in which a shard's files and record come to be, or take the place of others."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, Self

import pyarrow as pa
import pyarrow.parquet as pq

from cache_store.cache.files import record_of
from cache_store.errors import CacheError
from cache_store.format.formats import files_of_shard
from cache_store.format.names import commit_file
from cache_store.format.record import canonical_json
from cache_store.format.schema import CommitRecord, FileRecord, Spec
from cache_store.storage.files import naming
from cache_store.storage.store import Draft, Store


class ShardFiles:
    """A context manager: write the shard file, finish it with its samples table, look at both, commit.

    Until `commit`, what was there stays as it was; without it, nothing is left.
    """

    def __init__(self, store: Store, spec: Spec, shard: int) -> None:
        self._store, self._shard = store, shard
        self._names = files_of_shard(spec, shard)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        attempts = [self._store.clear_drafts(name) for name in self._names]
        self.attempt = attempts[0]
        self._drafts = [self._begin(self._names[0])]
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def _begin(self, name: str) -> Draft:
        return self._open.enter_context(self._store.draft(name, self.attempt))

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """The shard file's stream; a disk's refusal names the file."""
        with naming(self._store.where(self._names[0])):
            yield self._drafts[0].stream

    def read_back(self) -> memoryview:
        """The shard file as it was written so far."""
        self._drafts[0].finish()
        return self._drafts[0].map()

    def finish(self, samples: pa.Table) -> tuple[FileRecord, ...]:
        """Both files whole, on the disk; what a record says of them."""
        self._drafts[0].finish()
        table = self._begin(self._names[1])
        with naming(self._store.where(self._names[1])):
            write_rows(table.stream, samples)
        table.finish()
        self._drafts.append(table)
        return tuple(record_of(name, draft.map()) for name, draft in zip(self._names, self._drafts, strict=True))

    def commit(self, record: CommitRecord) -> None:
        """Put files and record in the place of what was there."""
        name = commit_file(self._shard)
        self._store.delete(name)  # it vouches for the files that are replaced now
        for draft in self._drafts:
            draft.publish()
        if not self._store.put_if_absent(name, canonical_json(record)):
            raise CacheError(f"{self._store.where(name)} was written by another program meanwhile; run one build only")


def write_rows(stream: BinaryIO, samples: pa.Table) -> None:
    """Equal tables give equal bytes, however they are held."""
    pq.write_table(samples.combine_chunks(), stream, compression="zstd")
