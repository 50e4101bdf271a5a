"""The one way in which a shard's files and record come to be, or take the place of others."""

from contextlib import AbstractContextManager, ExitStack
from typing import Any, BinaryIO, NoReturn, Self

import pyarrow as pa
import pyarrow.parquet as pq

from cache_store.cache.files import record_of, stored_sha256
from cache_store.cache.metadata import read_commit
from cache_store.cache.writing.withdrawn import clear_mark, withdraw
from cache_store.errors import CacheError
from cache_store.format.formats import files_of_shard
from cache_store.format.names import commit_file
from cache_store.format.record import canonical_json
from cache_store.format.schema import CommitRecord, FileRecord, Spec
from cache_store.refusal import differing, refuse
from cache_store.storage.files import unused_attempt
from cache_store.storage.store import Draft, Store


class ShardFiles:
    """A context manager: write the shard file, finish it with its samples table, look at both, commit.

    Until `commit`, what was there stays as it was; without it, nothing is left. Where the shard is `shared`, other
    programs may be writing it too: whoever is first gives a file its name, and nobody replaces or deletes any.
    """

    def __init__(self, store: Store, spec: Spec, shard: int, *, shared: bool = False) -> None:
        self._store, self._shard, self._shared = store, shard, shared
        self._names = files_of_shard(spec, shard)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        attempts = [1] if self._shared else [self._store.clear_drafts(name) for name in self._names]
        self.attempt = attempts[0]
        self._scratch = unused_attempt() if self._shared else self.attempt
        self._drafts = [self._begin(self._names[0])]
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def _begin(self, name: str) -> Draft:
        return self._open.enter_context(self._store.draft(name, self._scratch))

    def writing(self) -> AbstractContextManager[BinaryIO]:
        """The shard file's stream."""
        return self._drafts[0].writing()

    def read_back(self) -> memoryview:
        """The shard file as it was written so far."""
        self._drafts[0].finish()
        return self._drafts[0].map()

    def finish(self, samples: pa.Table) -> tuple[FileRecord, ...]:
        """Both files whole, on the disk; what a record says of them."""
        self._drafts[0].finish()
        table = self._begin(self._names[1])
        with table.writing() as stream:
            write_rows(stream, samples)
        table.finish()
        self._drafts.append(table)
        return tuple(record_of(name, draft.map()) for name, draft in zip(self._names, self._drafts, strict=True))

    def commit(self, record: CommitRecord) -> CommitRecord:
        """Put files and record in place; the record that stands, of the same content, if by another program.

        StaleError where the other's content differs.
        """
        name, marked = commit_file(self._shard), False
        if self._shared:
            if other := read_commit(self._store, self._shard):
                return self._equal(other, record)
            self._publish_beside_others(record)
        else:
            marked = withdraw(self._store, self._shard)
            for draft in self._drafts:
                draft.publish()
        if self._store.put_if_absent(name, canonical_json(record)):
            if marked:
                clear_mark(self._store, self._shard)
            return record
        if (other := read_commit(self._store, self._shard)) is None:
            raise CacheError(
                f"{self._store.where(name)} was written and deleted by another program; run one build only"
            )
        return self._equal(other, record)

    def _publish_beside_others(self, record: CommitRecord) -> None:
        """Name each file, unless one of the same bytes has its name."""
        for draft, ours in zip(self._drafts, record.content.files, strict=True):
            if draft.publish_if_absent() or (lies := stored_sha256(self._store, ours.path)) == ours.sha256:
                continue
            if other := read_commit(self._store, self._shard):
                self._equal(other, record)
            raise CacheError(
                f"{self._store.where(ours.path)} holds sha256 {lies}, of another rank or of one that died, and came "
                f"out as {ours.sha256} here; it stays. Once no rank runs, `precompute plan` of this cache clears it"
            )

    def _equal(self, other: CommitRecord, record: CommitRecord) -> CommitRecord:
        """The record that was there first, of the same content; StaleError naming both where it is not."""
        if other.content.digest != record.content.digest:
            refuse_other_content(self._store, other, record)
        return other


def refuse_other_content(store: Store, committed: CommitRecord, ours: CommitRecord) -> NoReturn:
    """StaleError naming both, and what made them."""
    before, now = (
        {"content": each.content.digest, "host": each.run.host, "device": each.run.device, **each.run.versions}
        for each in (committed, ours)
    )
    refuse(
        f"{store}: shard {ours.content.shard} came out otherwise here than as it was committed meanwhile, which stays",
        differing(before, now),
        ["ranks make the same bytes on machines and libraries that are alike; run this one on such"],
        held="committed",
        now="here",
    )


def write_rows(stream: BinaryIO, samples: pa.Table) -> None:
    """Equal tables give equal bytes, however they are held."""
    pq.write_table(samples.combine_chunks(), stream, compression="zstd")
