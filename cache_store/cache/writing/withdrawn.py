"""Withdraw a shard's record while its files are replaced.

If the store has no exclusive claims, another program may be building a shard that has no record, so its files are not
replaced. A mark tells a rerun of a dead build that the record was withdrawn, so that the files may be replaced.
"""

from collections.abc import Iterable

from cache_store.format.names import commit_file
from cache_store.storage.files import SCRATCH_SUFFIX, scratch_of
from cache_store.storage.store import Store


def withdraw(store: Store, shard: int) -> bool:
    """Delete a shard's record before its files are replaced; return whether a mark was written."""
    leaves_mark = not store.keeps_others_out and store.has(commit_file(shard))
    if leaves_mark:
        store.put_whole(mark_of(shard), b"")
    if leaves_mark or store.keeps_others_out:
        store.delete(commit_file(shard))
    return leaves_mark


def clear_mark(store: Store, shard: int) -> None:
    """Delete the mark of a shard that has its new record; sealing deletes the marks of builds that died."""
    store.delete(mark_of(shard))


def withdrawn_shards(names: Iterable[str]) -> frozenset[int]:
    """Return the shards that have a mark among the `names` in the folder of commit records."""
    records = (record for name in names if (record := scratch_of(name)))
    stems = (record.removesuffix(".json") for record in records)
    return frozenset(int(stem) for stem in stems if stem.isdecimal())


def mark_of(shard: int) -> str:
    """Return the name of a shard's mark: that of a scratch file, so that `clear_leftovers` deletes it."""
    folder, _, name = commit_file(shard).rpartition("/")
    return f"{folder}/.{name}.1{SCRATCH_SUFFIX}"
