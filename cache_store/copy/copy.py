"""`cache-store copy`: copy a cache to another place; each file is checked when it is read and after it is written.

Shards are copied several at a time, each with its commit record last; the seal is copied after all of them. A stopped
copy resumes where it was, and is an unfinished cache until then.
"""

import hashlib
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

import msgspec

from cache_store.cache.metadata import has_cache, metadata_of, read_spec, refuse_foreign_place, stored_sha256
from cache_store.cache.reader import open_cache
from cache_store.cache.survey import size_problem, survey_records
from cache_store.copy.convert import Copied, put_unless_equal, refuse_overlap
from cache_store.errors import CacheError
from cache_store.format.layout import BUILD_FILE, PLAN_FILE, SEAL_FILE, commit_file
from cache_store.format.record import canonical_json
from cache_store.format.schema import CommitRecord, FileRecord, Seal, Spec
from cache_store.program.progress_bar import ProgressBar
from cache_store.refusal import Difference, counted, refuse
from cache_store.storage.store import Address, Store, open_store, with_listing
from cache_store.verify.verify import clear_leftovers, verify

COPIED_AT_ONCE = 8
"""Shards copied at the same time: over a network, each mostly waits for answers."""

READ_BYTES = 1 << 20


def run_copy(cache: str, out: str) -> int:
    with ProgressBar("copy", read_spec(cache).num_shards, "shard") as bar:
        done = copy(cache, out, bar.update)
    kept = f"; {done.kept:,} were already there, with the same records" if done.kept else ""
    print(f"copied {counted(done.shards, 'shard')}, each file checked as it was read and read back{kept}")
    print(f"sealed {out}: {counted(done.seal.cached, 'sample')}, cache identity {done.seal.identity}")
    print(f"next: cache-store verify {shlex.quote(out)} --level full")
    return 0


def copy(root: Address, out: Address, progress: Callable[[int], object] = lambda shards: None) -> Copied:
    """Copy the sealed cache `root` to `out`; `progress` gets the number of shards done.

    Raises ConfigError for a wrong place, CacheError for a damaged source or a copy that does not read back as it was
    written, and StaleError for an unfinished source or if `out` holds another cache.
    """
    from_store, target = open_store(root), open_store(out)
    refuse_overlap(from_store, target)
    seal, spec = open_cache(from_store).seal, read_spec(from_store)
    verify(from_store, "quick").raise_if_damaged()
    refuse_foreign_place(target, "OUT")
    refuse_other_copy(target, spec, seal)
    with target.claim():
        copy_file(from_store, target, target, msgspec.structs.replace(seal.plan_file, path=PLAN_FILE))
        put_checked(target, BUILD_FILE, from_store.read(BUILD_FILE))
        for name, data in metadata_of(spec):
            put_checked(target, name, data)
        copied = copy_shards(from_store, target, seal, progress)
        clear_leftovers(target, spec)
        put_checked(target, SEAL_FILE, from_store.read(SEAL_FILE))
    return Copied(seal=seal, shards=copied, kept=spec.num_shards - copied)


def refuse_other_copy(target: Store, spec: Spec, seal: Seal) -> None:
    """Raise StaleError if the target holds another cache, so that a copy of this one cannot resume there."""
    if not has_cache(target):
        return
    survey = survey_records(target)
    pairs = {"spec digest": (survey.spec.value and survey.spec.value.digest, spec.digest)}
    if survey.seal.value:
        pairs["cache identity"] = (survey.seal.value.identity, seal.identity)
    others = [shard for shard, record in sorted(survey.records.items()) if not seal.holds(shard, record.content)]
    differing = [Difference(name, str(found), now) for name, (found, now) in pairs.items() if found not in (None, now)]
    if others and not differing:
        digest = survey.records[others[0]].content.digest
        differing = [Difference(f"shard {others[0]}", digest, seal.commits[others[0]])]
    if differing:
        refuse(f"{target} holds another cache", differing, ["name another place for OUT; this one is untouched"])


def copy_shards(from_store: Store, target: Store, seal: Seal, progress: Callable[[int], object]) -> int:
    """Copy the missing shards and return their number; after an error, shards being copied are finished first."""
    records, there = survey_records(from_store).records, with_listing(target)
    with ThreadPoolExecutor(COPIED_AT_ONCE) as pool:
        try:
            copied = [
                pool.submit(copy_shard, from_store, target, there, record) for _, record in sorted(records.items())
            ]
            for done in as_completed(copied):
                done.result()
                progress(1)
            return sum(each.result() for each in copied)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def copy_shard(from_store: Store, target: Store, there: Store, record: CommitRecord) -> bool:
    """Copy a shard unless it is complete; return whether it was copied. `there` lists the target as it was before."""
    name, files = commit_file(record.content.shard), record.content.files
    data = canonical_json(record)
    if there.has(name):
        if target.read(name) == data and not any(size_problem(there, file) for file in files):
            return False
        target.delete(name)  # first: a record says that its files are complete
    for file in files:
        copy_file(from_store, target, there, file)
    put_checked(target, name, data)
    return True


def copy_file(from_store: Store, target: Store, there: Store, file: FileRecord) -> None:
    """Copy a file unless it is there; CacheError if source or copy does not have the recorded bytes."""
    if not size_problem(there, file) and stored_sha256(target, file.path) == file.sha256:
        return
    with from_store.open(file.path) as stream, target.draft(file.path) as draft:
        digest = hashlib.sha256()
        while block := stream.read(READ_BYTES):
            digest.update(block)
            draft.stream.write(block)
        if digest.hexdigest() != file.sha256:
            verified = f"cache-store verify {shlex.quote(str(from_store))} --level full"
            raise CacheError(
                f"{from_store.where(file.path)} is damaged: its sha256 is not as recorded; run `{verified}`"
            )
        draft.finish()
        draft.publish()
    if stored_sha256(target, file.path) != file.sha256:
        raise CacheError(f"{target.where(file.path)} does not read back as it was written; run the same command again")


def put_checked(target: Store, name: str, data: bytes) -> None:
    """Write a small file and check it by reading it back."""
    put_unless_equal(target, name, data)
    if target.read(name) != data:
        raise CacheError(f"{target.where(name)} does not read back as it was written; run the same command again")
