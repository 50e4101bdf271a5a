"""`cache-store copy`: copy a cache to another place, byte for byte or into another form or codec.

Each file is checked when it is read and after it is written; in another form or codec, each sample. Commit records come
last in their shards, and the seal last of all: a stopped copy is an unfinished cache, and resumes.
"""

import hashlib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import msgspec
import numpy as np

from cache_store.cache.commit import sum_up
from cache_store.cache.metadata import (
    metadata_of,
    open_plan,
    put_in_force,
    put_part,
    put_texts,
    read_build,
    read_spec,
    read_texts,
    refuse_foreign_place,
    stored_sha256,
)
from cache_store.cache.reader import open_cache
from cache_store.cache.survey import ShardOnDisk, Survey, size_problem, survey_records
from cache_store.copy.shards import CacheAt, OldShard, OldShardError, copy_samples
from cache_store.errors import CacheError, ConfigError
from cache_store.format.formats import FORMATS
from cache_store.format.layout import BUILD_FILE, SEAL_FILE, TEXTS_FILE, commit_file
from cache_store.format.record import canonical_json, sign
from cache_store.format.schema import (
    CommitRecord,
    FileRecord,
    Part,
    PartTexts,
    Seal,
    ShardRun,
    Spec,
    even_shards,
    joined_runs,
)
from cache_store.log import log_about, log_result
from cache_store.messages import counted, differences_between, refuse
from cache_store.options import CopyConfig
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.store import Address, Store, open_store, with_listing
from cache_store.verify.record import usable_record
from cache_store.verify.verify import clear_leftovers, verify

COPIED_AT_ONCE = 8
"""Shards copied byte for byte at a time: over a network, each mostly waits for answers."""

READ_BYTES = 1 << 20

ShardT = TypeVar("ShardT")

Copying = Callable[[ShardT], tuple[CommitRecord, bool]]
"""Copies a shard unless it is there; returns its record, and whether it was copied now."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """The copy's seal, and the numbers of shards copied now and already there."""

    seal: Seal
    shards: int
    kept: int
    is_new_form: bool


def run_copy(cache: str, out: str, config: CopyConfig, *, reshard: bool) -> int:
    log_about(cache=cache)
    shards = spec_of_copy(read_spec(cache), config, reshard=reshard).num_shards
    with ProgressBar("copy", shards, "shard") as bar:
        done = copy(cache, out, config, bar.update, reshard=reshard)
    checked = "sample" if done.is_new_form else "file"
    kept = f"; {done.kept:,} were already there, with matching records" if done.kept else ""
    print(f"copied {counted(done.shards, 'shard')}, each {checked} checked as it was read and read back{kept}")
    size = f"{counted(done.seal.cached, 'sample')}, {done.seal.array.bytes:,} bytes"
    print(f"sealed {out}: {size}, cache identity {done.seal.identity}")
    print(f"next: cache-store verify {shlex.quote(out)} --level full")
    copied = {"out": out, "identity": done.seal.identity, "shards": done.shards, "kept": done.kept}
    log_result(f"copied {counted(done.shards, 'shard')} to {out}", copy=copied)
    return 0


def copy(
    root: Address, out: Address, config: CopyConfig, progress: Callable[[int], object], *, reshard: bool = False
) -> Copied:
    """Copy the sealed cache `root` to `out`, in packed shards if asked to; `progress` gets the number of shards done.

    Raises ConfigError for a wrong place or a form that cannot hold the array, CacheError for a damaged source or a copy
    that reads back wrong, StaleError for an unfinished source or if `out` holds another cache.
    """
    from_store, to_store = open_store(root), open_store(out)
    refuse_overlap(from_store, to_store)
    opened = open_cache(from_store)
    source_seal = opened.seal
    verify(from_store, "quick").raise_if_damaged()
    source = CacheAt(from_store, opened.spec)
    target = CacheAt(to_store, spec_of_copy(source.spec, config, reshard=reshard))
    is_new_form = target.spec != source.spec
    refuse_foreign_place(to_store, "OUT")
    records, there = survey_records(from_store).records, survey_records(to_store)
    is_packed = target.spec.shards != source.spec.shards
    refuse_other_cache(there, target.spec, None if is_packed else records)
    in_order = [record for _, record in sorted(records.items())]
    with to_store.claim():
        put_checked(to_store, BUILD_FILE, build_of_copy(source, target) if is_new_form else from_store.read(BUILD_FILE))
        listing = with_listing(to_store)
        if is_packed:
            plan_files = repack_plan(source, target)
        else:
            texts = read_texts(from_store)
            plan_files = [*source_seal.plan_files]
            for file in (*plan_files, *(each.file(part) for part, each in enumerate(texts.parts))):
                copy_file(from_store, to_store, listing, file)
            put_checked(to_store, TEXTS_FILE, canonical_json(texts))
        for name, data in metadata_of(target.spec):
            put_checked(to_store, name, data)
        if is_new_form:
            copy_one = shard_copier(source, records, target, there.shards)
            copied = copy_shards(range(target.spec.num_shards), copy_one, 1, progress)
            seal = sum_up(to_store, target.spec, [record.content for record, _ in copied], plan_files)
            if not is_packed:  # another machine may solve for the preview's map with other roundings
                array = msgspec.structs.replace(source_seal.array, bytes=seal.array.bytes)
                seal = sign(msgspec.structs.replace(seal, array=array))
        else:
            copied = copy_shards(in_order, partial(copy_shard, from_store, to_store, listing), COPIED_AT_ONCE, progress)
            for file in (source_seal.rejected_file, source_seal.shards_file):
                copy_file(from_store, to_store, listing, file)
            seal = source_seal
        clear_leftovers(to_store, target.spec)
        to_store.make_durable(commit_file(0))  # and so all other records
        put_checked(to_store, SEAL_FILE, canonical_json(seal) if is_new_form else from_store.read(SEAL_FILE))
    shards = sum(is_copied for _, is_copied in copied)
    return Copied(seal=seal, shards=shards, kept=len(copied) - shards, is_new_form=is_new_form)


def refuse_overlap(root: Store, out: Store) -> None:
    if root.contains(out) or out.contains(root):
        raise ConfigError(f"OUT: {out} lies inside the cache {root}, or contains it; name another folder")


def spec_of_copy(spec: Spec, config: CopyConfig, *, reshard: bool) -> Spec:
    """Make the spec of the copy; ConfigError if its form cannot hold the array."""
    form = config.format or spec.store_format
    codec = config.codec or ("none" if form == "webdataset" else spec.array.codec)
    if problem := FORMATS[form].unsupported(spec.array.dtype, codec):
        given = f"--format {form}" if config.format else f"--codec {codec} of a cache in format {form}"
        raise ConfigError(f"{given}: {problem}")
    array = msgspec.structs.replace(spec.array, codec=codec)
    spec = msgspec.structs.replace(spec, store_format=form, array=array)
    return packed(spec) if reshard else spec


def packed(spec: Spec) -> Spec:
    """Return the spec with neighbouring shards of one part and array merged into full ones."""
    parts, shards, lengths = list[Part](), list[ShardRun](), np.diff(spec.bounds).tolist()
    for part, each in zip(spec.parts, spec.part_shards, strict=True):
        runs = [
            run
            for array, group in groupby(each, lambda shard: int(spec.array_indices[shard]))
            for run in even_shards(sum(lengths[shard] for shard in group), spec.samples_per_shard, spec.names[array])
        ]
        parts.append(msgspec.structs.replace(part, shards=sum(run.shards for run in runs)))
        shards += runs
    return msgspec.structs.replace(spec, parts=tuple(parts), shards=tuple(joined_runs(shards)))


def repack_plan(source: CacheAt, target: CacheAt) -> list[FileRecord]:
    """Write the source's plan and texts, cut as the target says; return the parts' files."""
    plan, (store, spec), files, texts = open_plan(*source), target, list[FileRecord](), list[PartTexts]()
    for number, shards in enumerate(spec.part_shards):
        whole, first = plan.part_rows(number), spec.shard_rows(shards[0]).start
        tables = [whole.slice(rows.start - first, len(rows)) for rows in map(spec.shard_rows, shards)]
        sizes = [spec.array_of(shard).size.name for shard in shards]
        files.append(put_part(store, number, [*zip(tables, sizes, strict=True)]).file)
        texts.append(put_texts(store, number, tables))
    put_in_force(store, texts)
    return files


def refuse_other_cache(there: Survey, spec: Spec, records: Mapping[int, CommitRecord] | None) -> None:
    """Raise StaleError if the target holds another cache, so that this copy cannot resume there.

    `records` are those of the copy's shards, if it has the source's shards. Their inputs and sums are compared: in a
    new form, a shard's files differ.
    """
    pairs: list[tuple[str, Any, Any]] = []
    if there.spec.value:
        pairs.append(("spec", msgspec.to_builtins(there.spec.value), msgspec.to_builtins(spec)))
    for shard, record in there.records.items() if records is not None else ():
        other = records.get(shard) if records else None
        pairs.append((f"shard {shard}", made_of(record), made_of(other)))
    for name, found, expected in pairs:
        if differing := differences_between({name: found}, {name: expected}):
            refuse(
                f"{there.store} holds another cache", differing, ["name another place for OUT; this one is untouched"]
            )


def made_of(record: CommitRecord | None) -> dict[str, object] | None:
    return {"rows_digest": record.content.rows_digest, "sums": record.content.sums} if record else None


def build_of_copy(source: CacheAt, target: CacheAt) -> bytes:
    """Make the copy's build record, with its own form and codec, so that a repair builds these."""
    record = read_build(source.store)
    config = dict(record.config)
    if "store" in config:
        form = {"format": target.spec.store_format, "codec": target.spec.array.codec}
        config["store"] = {**config["store"], **form}
    listed = record.listed if target.spec.shards == source.spec.shards else None
    digest = record.spec_digest and target.spec.digest
    return canonical_json(sign(msgspec.structs.replace(record, config=config, spec_digest=digest, listed=listed)))


def copy_shards(
    shards: Iterable[ShardT], copy_one: Copying[ShardT], at_once: int, progress: Callable[[int], object]
) -> list[tuple[CommitRecord, bool]]:
    """Copy shards, `at_once` at a time; after an error, shards in hand are finished first."""
    with ThreadPoolExecutor(at_once) as pool:
        try:
            copied = [pool.submit(copy_one, shard) for shard in shards]
            for done in as_completed(copied):
                done.result()
                progress(1)
            return [each.result() for each in copied]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def shard_copier(
    source: CacheAt, records: Mapping[int, CommitRecord], target: CacheAt, there: Mapping[int, ShardOnDisk]
) -> Copying[int]:
    """Return a function that copies samples of a sealed cache into a shard of another form or other lengths.

    The target's plan is on disk. `records` are the source's; `there` has the shards that the target holds already.
    """
    old_plan, new_plan, (store, spec) = open_plan(*source), open_plan(*target), target

    def parts_with(rows: range) -> Iterator[tuple[OldShard, range]]:
        old = source.spec
        for shard in range(old.shard_of_row(rows.start), old.shard_of_row(rows[-1]) + 1):
            record, held = records[shard], old.shard_rows(shard)
            slots = range(max(rows.start, held.start) - held.start, min(rows.stop, held.stop) - held.start)
            yield OldShard(source, record, old_plan.recorded_rows(record.content)), slots

    def copy_one(shard: int) -> tuple[CommitRecord, bool]:
        if shard in there:
            held, problem = usable_record(spec, shard, there[shard])
            if held and not problem:
                return held, False
        store.delete(SEAL_FILE)
        try:
            return copy_samples(target, shard, new_plan.shard(shard), parts_with(spec.shard_rows(shard))), True
        except OldShardError as error:
            raise damaged(source.store, str(error)) from None

    return copy_one


def damaged(store: Store, problem: str) -> CacheError:
    return CacheError(f"{store} is damaged: {problem}; run `cache-store verify {shlex.quote(str(store))} --level full`")


def copy_shard(from_store: Store, target: Store, there: Store, record: CommitRecord) -> tuple[CommitRecord, bool]:
    """Copy a shard's files unless it is complete; `there` lists the target as it was before."""
    name, files = commit_file(record.content.shard), record.content.files
    data = canonical_json(record)
    if there.has(name):
        if target.read(name) == data and not any(size_problem(there, file) for file in files):
            return record, False
        target.delete(name)  # first: a record says that its files are complete
    for file in files:
        copy_file(from_store, target, there, file)
    put_checked(target, name, data)
    return record, True


def copy_file(from_store: Store, target: Store, there: Store, file: FileRecord) -> None:
    """Copy a file unless it is there; CacheError if source or copy lacks the recorded bytes."""
    if not size_problem(there, file) and stored_sha256(target, file.path) == file.sha256:
        target.make_durable(file.path)
        return
    with from_store.open(file.path) as stream, target.draft(file.path) as draft:
        digest = hashlib.sha256()
        while block := stream.read(READ_BYTES):
            digest.update(block)
            draft.stream.write(block)
        if digest.hexdigest() != file.sha256:
            raise damaged(from_store, f"the sha256 of {file.path} is not as recorded")
        draft.finish()
        draft.publish()
    if stored_sha256(target, file.path) != file.sha256:
        raise CacheError(f"{target.where(file.path)} does not read back as it was written; run the same command again")


def put_checked(target: Store, name: str, data: bytes) -> None:
    if not target.has(name) or target.read(name) != data:
        target.put_whole(name, data)
        if target.read(name) != data:
            raise CacheError(f"{target.where(name)} does not read back as it was written; run the same command again")
