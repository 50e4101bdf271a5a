"""Read and write a cache's Parquet tables, and make records of its files."""

import hashlib
from collections.abc import Iterable
from functools import partial

import pyarrow as pa

from cache_store.format.names import PLAN_FILE, samples_file
from cache_store.format.plan import PlanFile, encode_plan
from cache_store.format.schema import FileRecord
from cache_store.format.tables import (
    MAX_FOOTER_BYTES,
    MAX_PLAN_FOOTER_BYTES,
    TableFile,
    refuse_large_footer,
)
from cache_store.storage.files import stream_sha256
from cache_store.storage.store import Address, Store, open_store


def open_table(store: Store, name: str, max_footer_bytes: int = MAX_FOOTER_BYTES) -> TableFile:
    """Open a Parquet file; CacheError if it is missing or broken."""
    return TableFile(partial(store.open, name), store.where(name), max_footer_bytes)


def open_plan(cache: Address) -> PlanFile:
    return PlanFile(open_table(open_store(cache), PLAN_FILE, MAX_PLAN_FOOTER_BYTES))


def open_recorded_plan(store: Store) -> tuple[PlanFile, FileRecord]:
    """Open the plan and record its file, opened once for both.

    Raises CacheError, before the whole file is read, if its end is not that of a Parquet file.
    """
    where = store.where(PLAN_FILE)
    with store.open(PLAN_FILE) as stream:
        refuse_large_footer(stream, where, MAX_PLAN_FOOTER_BYTES)
        sha256 = stream_sha256(stream)
        file = FileRecord(path=PLAN_FILE, bytes=stream.tell(), sha256=sha256)
        table = TableFile(partial(store.open, PLAN_FILE), where, MAX_PLAN_FOOTER_BYTES, opened=stream)
    return PlanFile(table), file


def write_plan(store: Store, shards: Iterable[pa.Table]) -> None:
    with store.draft(PLAN_FILE) as draft:
        encode_plan(draft.stream, shards)
        draft.finish()
        draft.publish()


def read_samples(cache: Address, shard: int, columns: list[str] | None = None) -> pa.Table:
    return open_table(open_store(cache), samples_file(shard)).whole(columns)


def stored_sha256(store: Store, name: str) -> str:
    with store.open(name) as stream:
        return stream_sha256(stream)


def file_record(store: Store, name: str) -> FileRecord:
    return FileRecord(path=name, bytes=store.size(name), sha256=stored_sha256(store, name))


def record_bytes(name: str, data: bytes | memoryview) -> FileRecord:
    """Make the record of a file that holds these bytes."""
    return FileRecord(path=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
