"""Write or replace a shard's files and its commit record, and seal a cache; every writer uses this module.

If the store has no exclusive claims, another program may be building a shard that has no record, so its files are not
replaced; `precompute plan` deletes those of a dead build.
"""

import base64
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, NoReturn, Self

import pyarrow as pa
import pyarrow.parquet as pq

from cache_store.cache.metadata import read_commit, record_bytes, stored_sha256, sums_of, write_rejected, write_roll
from cache_store.errors import CacheError
from cache_store.format.formats import files_of_shard
from cache_store.format.layout import SEAL_FILE, SHARDS_FILE, commit_file
from cache_store.format.record import FORMAT_VERSION, canonical_json, sign
from cache_store.format.roll import Roll
from cache_store.format.schema import ArraySummary, CommitContent, CommitRecord, FileRecord, Seal, Spec
from cache_store.format.sums import ShardSums, summarise
from cache_store.format.tables import SUMS_KEY
from cache_store.messages import differences_between, refuse
from cache_store.storage.publish import unused_attempt
from cache_store.storage.store import Draft, Store


class ShardFiles:
    """Writes a shard's files unseen, then commits them; without `commit`, nothing is left.

    Other programs may write a `shared` shard, too: the first to publish a file wins, and none replaces or deletes one.
    A `rewritten` shard keeps its old record until the new one.
    """

    def __init__(self, store: Store, spec: Spec, shard: int, *, shared: bool = False, rewritten: bool = False) -> None:
        self._store, self._shard, self._shared, self._rewritten = store, shard, shared, rewritten
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

    @property
    def stream(self) -> BinaryIO:
        """The shard file's."""
        return self._drafts[0].stream

    def read_back(self) -> memoryview:
        self._drafts[0].finish()
        return self._drafts[0].map()

    def finish(self, samples: pa.Table, sums: bytes | None, null_text: bytes | None = None) -> tuple[FileRecord, ...]:
        """Write all files, unpublished, and return their records; `null_text` is in shard 0 of texts."""
        self._drafts[0].finish()
        with self._adding(self._names[1]) as stream:
            write_rows(stream, samples, sums)
        if null_text is not None:
            with self._adding(self._names[2]) as stream:
                stream.write(null_text)
        return tuple(record_bytes(name, draft.map()) for name, draft in zip(self._names, self._drafts, strict=True))

    @contextmanager
    def _adding(self, name: str) -> Iterator[BinaryIO]:
        draft = self._begin(name)
        yield draft.stream
        draft.finish()
        self._drafts.append(draft)

    def commit(self, record: CommitRecord) -> CommitRecord:
        """Publish files and record; return the committed one, perhaps another program's, or raise StaleError."""
        name = commit_file(self._shard)
        if self._rewritten:
            self._publish()
            self._store.put_whole(name, canonical_json(record))
            return record
        if self._shared:
            if other := read_commit(self._store, self._shard):
                return self._equal(other, record)
            self._publish_beside_others(record)
        else:
            self._store.delete(name)  # first: a record says that its files are complete
            self._publish()
        if self._store.put_if_absent(name, canonical_json(record)):
            return record
        if (other := read_commit(self._store, self._shard)) is None:
            raise CacheError(
                f"{self._store.where(name)} was written and deleted by another program; run one build only"
            )
        return self._equal(other, record)

    def _publish(self) -> None:
        for draft in self._drafts:
            draft.publish()

    def _publish_beside_others(self, record: CommitRecord) -> None:
        """Publish each file unless an equal one is already there; CacheError or StaleError if a different one is."""
        for draft, ours in zip(self._drafts, record.content.files, strict=True):
            if draft.publish_if_absent() or (found := stored_sha256(self._store, ours.path)) == ours.sha256:
                continue
            if other := read_commit(self._store, self._shard):
                self._equal(other, record)
            raise CacheError(
                f"{self._store.where(ours.path)} has sha256 {found}, written by another rank, perhaps a dead one, but "
                f"{ours.sha256} here; it stays. Once no rank runs, `precompute plan` of this cache deletes it"
            )

    def _equal(self, other: CommitRecord, record: CommitRecord) -> CommitRecord:
        """Return the record that was there first; StaleError, naming both, if its content differs."""
        if other.content.digest != record.content.digest:
            refuse_conflicting_commit(self._store, other, record)
        return other


def refuse_conflicting_commit(store: Store, committed: CommitRecord, ours: CommitRecord) -> NoReturn:
    """Raise StaleError with both digests, hosts, devices and versions."""
    before, now = (
        {"content": each.content.digest, "host": each.run.host, "device": each.run.device, **each.run.versions}
        for each in (committed, ours)
    )
    refuse(
        f"{store}: shard {ours.content.shard} differs here from the one that another rank has committed, which stays",
        differences_between(before, now),
        ["ranks give equal bytes only on equal machines and libraries; run this one on such a machine"],
        held="committed",
        now="here",
    )


def write_rows(stream: BinaryIO, samples: pa.Table, sums: bytes | None) -> None:
    """Write a samples table; equal tables give equal bytes, however they are chunked in memory."""
    with pq.ParquetWriter(stream, samples.schema, compression="zstd") as writer:
        writer.write_table(samples.combine_chunks())
        if sums is not None:
            writer.add_key_value_metadata({SUMS_KEY: base64.b64encode(sums).decode()})


def write_seal(store: Store, seal: Seal, held: Seal | None) -> Seal:
    if seal != held or not store.has(SEAL_FILE):
        store.put_whole(SEAL_FILE, canonical_json(seal))
    return seal


def sum_up(
    store: Store,
    spec: Spec,
    contents: Sequence[CommitContent],
    plan_files: Sequence[FileRecord],
    held: Seal | None = None,
) -> Seal:
    """Write rejected.parquet and shards.bin, and make the seal, unless the one `held` sums up these records."""
    shards_file = record_bytes(SHARDS_FILE, Roll.of(spec, contents).data)
    if held and (held.spec, held.plan_files, held.shards_file) == (spec, plan_files, shards_file):
        return held
    files = write_rejected(store, spec, contents), write_roll(store, spec, contents)
    return make_seal(spec, contents, sums_of(store, spec, contents), plan_files, *files)


def make_seal(
    spec: Spec,
    contents: Sequence[CommitContent],
    sums: Iterable[ShardSums | None],
    plan_files: Sequence[FileRecord],
    rejected_file: FileRecord,
    shards_file: FileRecord,
    array: ArraySummary | None = None,
) -> Seal:
    """Make the seal from the shards' records and sums, in order; `array`, if given, replaces the sums."""
    cached, rejected = sum(each.cached for each in contents), sum(each.rejected for each in contents)
    assert cached + rejected == spec.rows, (cached, rejected, spec.rows)
    reasons, remarks = Counter[str](), Counter[str]()
    for each in contents:
        reasons.update(each.reasons)
        remarks.update(each.remarks)
    if not cached:
        raise CacheError("every sample was rejected, so there is nothing to seal")
    seal = Seal(
        format_version=FORMAT_VERSION,
        spec=spec,
        cached=cached,
        rejected=rejected,
        withdrawn=sum(each.withdrawn for each in contents),
        reasons=dict(reasons),
        remarks=dict(remarks),
        cut_texts=sum(each.cut_texts for each in contents),
        plan_files=tuple(plan_files),
        rejected_file=rejected_file,
        shards_file=shards_file,
        array=array or summarise(filter(None, sums), sum(each.files[0].bytes for each in contents)),
        sha256="",
    )
    return sign(seal)
