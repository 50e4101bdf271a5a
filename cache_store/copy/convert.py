"""`cache-store convert`: convert a cache to the other format or another codec; latents stay equal bit for bit.

Each shard is written whole or not at all, so that a stopped conversion resumes. Memory is needed for one samples table
only: each latent is decoded, checked and written before the next is read.
"""

import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from cache_store.cache.commit import make_seal
from cache_store.cache.metadata import (
    has_cache,
    metadata_of,
    read_build,
    read_spec,
    refuse_foreign_place,
    stored_sha256,
)
from cache_store.cache.reader import open_cache
from cache_store.cache.survey import ShardOnDisk, survey_records
from cache_store.copy.convert_shard import CacheAt, ShardConverter
from cache_store.errors import ConfigError
from cache_store.format.array import CodecName
from cache_store.format.formats import FORMATS
from cache_store.format.layout import BUILD_FILE, PLAN_FILE, SEAL_FILE
from cache_store.format.record import canonical_json, sign
from cache_store.format.schema import BuildRecord, CommitContent, CommitRecord, Seal, Spec, StoreFormat
from cache_store.log import log_warning
from cache_store.program.progress_bar import ProgressBar
from cache_store.refusal import counted, differences_between, refuse
from cache_store.storage.store import Address, Store, open_store
from cache_store.verify.record import usable_record
from cache_store.verify.verify import clear_leftovers, verify

Records = dict[int, CommitRecord]
"""Commit records by shard."""

OTHER_FOLDER = "name another folder for OUT; this one is untouched"


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """The form that a cache is converted to."""

    format: StoreFormat | None = None
    """zarr: one Zarr v3 shard file per shard. webdataset: one uncompressed tar per shard. Default: the cache's own."""
    codec: CodecName | None = None
    """Codec of the new cache's latents; by default that of the cache, or none for tars, which support no other."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """The result of a copy or conversion: the new cache's seal and the numbers of shards."""

    seal: Seal
    shards: int
    """Shards written now, wholly or in part."""
    kept: int
    """Shards that were already there."""


def run_convert(cache: str, out: str, config: ConvertConfig) -> int:
    with ProgressBar("convert", read_spec(cache).rows, "sample") as bar:
        done = convert(cache, out, config, bar.update)
    kept = f"; {done.kept:,} were already there, with matching records" if done.kept else ""
    checked = ", every latent checked as it was read and as it was written" if done.shards else ""
    print(f"converted {counted(done.shards, 'shard')}{checked}{kept}")
    size = f"{counted(done.seal.cached, 'sample')}, {done.seal.array.bytes:,} bytes"
    print(f"sealed {out}: {size}, cache identity {done.seal.identity}")
    print(f"next: cache-store verify {shlex.quote(out)} --level full")
    return 0


def convert(root: Address, out: Address, config: ConvertConfig, progress: Callable[[int], object]) -> Copied:
    """Convert the sealed cache `root` into a sealed cache at `out`; `progress` gets the number of samples done.

    Raises ConfigError for wrong folders or a format that cannot hold the array, CacheError for a damaged source, and
    StaleError for an unfinished source or if `out` holds another cache.
    """
    from_store, to_store = open_store(root), open_store(out)
    refuse_overlap(from_store, to_store)
    seal = open_cache(from_store).seal
    verify(from_store, "quick").raise_if_damaged()
    source = CacheAt(from_store, read_spec(from_store))
    target = CacheAt(to_store, converted_spec(source.spec, config))
    refuse_foreign_place(to_store, "OUT")
    refuse_other_cache(target)
    with to_store.claim():
        copy_metadata(source, target, seal)
        kept, converted = convert_shards(source, target, progress)
        clear_leftovers(to_store, target.spec)
        sealed = seal_copy(target, {**kept, **converted}, seal)
        return Copied(seal=sealed, shards=len(converted), kept=len(kept))


def refuse_overlap(root: Store, out: Store) -> None:
    if root.contains(out):
        raise ConfigError(f"OUT: {out} lies inside the cache {root}, which must not change; name another folder")
    if out.contains(root):
        raise ConfigError(f"OUT: {out} contains the cache {root}; name another folder")


def converted_spec(spec: Spec, config: ConvertConfig) -> Spec:
    """Make the spec of the new cache; ConfigError if its format cannot hold the array."""
    if not (config.format or config.codec):
        raise ConfigError(f"name another format, such as --format {other_form(spec.store_format)}, or another --codec")
    form = config.format or spec.store_format
    codec = config.codec or ("none" if form == "webdataset" else spec.array.codec)
    if problem := FORMATS[form].unsupported(spec.array.dtype, codec):
        given = f"--format {form}" if config.format else f"--codec {codec} of a cache in format {form}"
        raise ConfigError(f"{given}: {problem}")
    array = msgspec.structs.replace(spec.array, codec=codec)
    return msgspec.structs.replace(spec, store_format=form, array=array)


def other_form(held: StoreFormat) -> StoreFormat:
    return next(form for form in FORMATS if form != held)


def refuse_other_cache(target: CacheAt) -> None:
    if has_cache(target.store):
        found, expected = (msgspec.to_builtins(each) for each in (read_spec(target.store), target.spec))
        if differences := differences_between(found, expected):
            refuse(f"{target.store} holds another cache", differences, [OTHER_FOLDER])


def copy_metadata(source: CacheAt, target: CacheAt, seal: Seal) -> None:
    """Write everything but shards and seal, the spec last; files that are right already are kept."""
    put_unless_equal(target.store, BUILD_FILE, canonical_json(converted_build(source, target)))
    copy_plan(source.store, target.store, seal)
    for name, data in metadata_of(target.spec):
        put_unless_equal(target.store, name, data)


def converted_build(source: CacheAt, target: CacheAt) -> BuildRecord:
    """Make the new cache's build record, with its own format and codec, so that a repair builds these."""
    record = read_build(source.store)
    config = dict(record.config)
    if "store" in config:
        form = {"format": target.spec.store_format, "codec": target.spec.array.codec}
        config["store"] = {**config["store"], **form}
    return sign(msgspec.structs.replace(record, config=config))


def copy_plan(from_store: Store, to_store: Store, seal: Seal) -> None:
    """Copy the plan, whose hash has just been verified, unless it is already there."""
    if to_store.has(PLAN_FILE) and stored_sha256(to_store, PLAN_FILE) == seal.plan_file.sha256:
        return
    with from_store.open(PLAN_FILE) as plan, to_store.draft(PLAN_FILE) as draft:
        shutil.copyfileobj(plan, draft.stream)
        draft.finish()
        draft.publish()


def put_unless_equal(store: Store, name: str, data: bytes) -> None:
    if not store.has(name) or store.read(name) != data:
        store.put_whole(name, data)


def convert_shards(source: CacheAt, target: CacheAt, progress: Callable[[int], object]) -> tuple[Records, Records]:
    """Convert the missing shards; return the records of the shards already there, and of those converted."""
    converter, kept, converted = ShardConverter(source, target, progress), Records(), Records()
    there = survey_records(target.store).shards
    for shard, record in sorted(survey_records(source.store).records.items()):
        if shard in there and (held := kept_record(target, there[shard], record.content)):
            kept[shard] = held
            progress(len(source.spec.shard_rows(shard)))
        else:
            target.store.delete(SEAL_FILE)
            converted[shard] = converter.convert(record)
    return kept, converted


def kept_record(target: CacheAt, on_disk: ShardOnDisk, content: CommitContent) -> CommitRecord | None:
    """Return the record of a shard that the target already has, or None; StaleError if it is another cache's."""
    record, problem = usable_record(target.spec, content.shard, on_disk)
    if problem is not None:
        log_warning(f"damage found, shard {content.shard} is converted again: {problem}")
        return None
    if record is not None:
        refuse_other_source(target, record, content)
    return record


def refuse_other_source(target: CacheAt, record: CommitRecord, content: CommitContent) -> None:
    """Raise StaleError if the shard was converted from different latents or samples."""
    found = msgspec.structs.replace(record.content, files=())
    expected = msgspec.structs.replace(content, files=(), recipe=record.content.recipe)
    if differences := differences_between(*(msgspec.to_builtins(each) for each in (found, expected))):
        refuse(f"{target.store} holds a shard {content.shard} of another cache", differences, [OTHER_FOLDER])


def seal_copy(target: CacheAt, records: Records, source_seal: Seal) -> Seal:
    """Seal the new cache, with the statistics copied: another machine would round them differently."""
    contents = [record.content for _, record in sorted(records.items())]
    seal = make_seal(target.spec, contents, source_seal.plan_file)
    array = msgspec.structs.replace(source_seal.array, bytes=seal.array.bytes)
    seal = sign(msgspec.structs.replace(seal, array=array))
    put_unless_equal(target.store, SEAL_FILE, canonical_json(seal))
    return seal
