"""Records that are withdrawn while a shard's files are replaced.

Where no claim keeps other programs out, a shard without a record may be in another's hands, so that its files are not
replaced. A mark says of one whose record was withdrawn that they may be, also to the rerun of a build that died.
"""

from collections.abc import Iterable

from cache_store.format.names import commit_file
from cache_store.storage.files import SCRATCH_SUFFIX, scratch_of
from cache_store.storage.store import Store


def withdraw(store: Store, shard: int) -> bool:
    """Delete a shard's record, which vouches for files that are replaced from now on; whether that left a mark."""
    leaves_mark = not store.keeps_others_out and store.has(commit_file(shard))
    if leaves_mark:
        store.put_whole(mark_of(shard), b"")
    if leaves_mark or store.keeps_others_out:
        store.delete(commit_file(shard))
    return leaves_mark


def clear_mark(store: Store, shard: int) -> None:
    """For a shard that has its new record; the seal clears those of builds that died."""
    store.delete(mark_of(shard))


def withdrawn_shards(names: Iterable[str]) -> frozenset[int]:
    """Find the shards that have a mark among the `names` in the folder of commit records."""
    records = (record for name in names if (record := scratch_of(name)))
    stems = (record.removesuffix(".json") for record in records)
    return frozenset(int(stem) for stem in stems if stem.isdecimal())


def mark_of(shard: int) -> str:
    """The name of a scratch file, which `clear_leftovers` deletes."""
    folder, _, name = commit_file(shard).rpartition("/")
    return f"{folder}/.{name}.1{SCRATCH_SUFFIX}"
