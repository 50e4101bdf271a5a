"""`cache-store convert`: copy a cache into the other form or codec, its latents equal bit for bit.

It works shard by shard, each whole or absent, so a stopped conversion resumes where it was. It needs memory for one
samples table: a latent is decoded, checked and written before the next is read.
"""

import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cache_store.cache.metadata import has_cache, read_build, read_commit, read_spec, refuse_foreign_folder
from cache_store.cache.reader import open_cache
from cache_store.cache.seal import make_seal, read_contents
from cache_store.convert.shard import CacheFolder, ShardConverter
from cache_store.errors import CacheError, ConfigError
from cache_store.format.formats import FORMATS, shard_format
from cache_store.format.record import canonical_json, signed
from cache_store.format.schema import (
    BUILD_FILE,
    PLAN_FILE,
    SEAL_FILE,
    SPEC_FILE,
    BuildRecord,
    CodecName,
    CommitContent,
    CommitRecord,
    Seal,
    Spec,
    StoreFormat,
)
from cache_store.refusal import differing, refuse
from cache_store.storage.claim import claim
from cache_store.storage.publish import file_sha256, publish, withdraw, write_file
from cache_store.verify.leftovers import clear_leftovers
from cache_store.verify.record import kept_record
from cache_store.verify.verify import verify

OTHER_FOLDER = "name another folder for OUT; this one is untouched"


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """The form that a cache is converted to."""

    format: StoreFormat
    """zarr: one Zarr v3 shard file per shard. webdataset: one uncompressed tar per shard."""
    codec: CodecName | None = None
    """Of the new cache's latents; as in the cache if not given, but none in tars, which hold no other."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion did, and the cache it leaves."""

    seal: Seal
    shards: int
    """Written now."""
    kept: int
    """Shards that an earlier run had written."""


def convert(root: Path, out: Path, config: ConvertConfig, progress: Callable[[int], object]) -> Conversion:
    """Bring `out` to the sealed copy of the sealed cache `root`; `progress` is called with the number of samples done.

    Raises ConfigError for wrong folders or an impossible form, CacheError for a source that is unfinished or damaged,
    StaleError where `out` holds another cache.
    """
    refuse_overlap(root, out)
    seal = open_cache(root).seal
    verify(root, "quick").raise_if_damaged()
    source = CacheFolder(root, read_spec(root))
    target = CacheFolder(out, converted_spec(source.spec, config))
    refuse_foreign_folder(out, "OUT")
    refuse_other_cache(target)
    with claim(out):
        copy_metadata(source, target, seal)
        shards, kept = convert_shards(source, target, progress)
        clear_leftovers(out, target.spec)
        return Conversion(seal=seal_copy(target, seal), shards=shards, kept=kept)


def refuse_overlap(root: Path, out: Path) -> None:
    if out.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"OUT: {out} lies in the cache {root}, which is never written to; name another folder")
    if root.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"OUT: {out} holds the cache {root}; name another folder")


def converted_spec(spec: Spec, config: ConvertConfig) -> Spec:
    """The spec of the new cache; ConfigError where the form cannot hold the array."""
    codec = config.codec or ("none" if config.format == "webdataset" else spec.array.codec)
    if problem := FORMATS[config.format].unsupported(spec.array.dtype, codec):
        raise ConfigError(f"--format {config.format}: {problem}")
    array = msgspec.structs.replace(spec.array, codec=codec)
    return msgspec.structs.replace(spec, store_format=config.format, array=array)


def refuse_other_cache(target: CacheFolder) -> None:
    if has_cache(target.root):
        found, expected = (msgspec.to_builtins(each) for each in (read_spec(target.root), target.spec))
        if differences := differing(found, expected):
            refuse(f"{target.root} holds another cache", differences, [OTHER_FOLDER])


def copy_metadata(source: CacheFolder, target: CacheFolder, seal: Seal) -> None:
    """Write everything but shards and seal, the spec last; files that are right already are kept."""
    write_unless_equal(target.root / BUILD_FILE, canonical_json(converted_build(source, target)))
    copy_plan(source.root, target.root, seal)
    metadata = shard_format(target.spec).metadata(target.spec)
    for name in sorted(metadata, key=lambda name: name == SPEC_FILE):
        write_unless_equal(target.root / name, metadata[name])


def converted_build(source: CacheFolder, target: CacheFolder) -> BuildRecord:
    """Make the new cache's build record, with its form, so that a repair builds that."""
    record = read_build(source.root)
    config = dict(record.config)
    if "store" in config:
        form = {"format": target.spec.store_format, "codec": target.spec.array.codec}
        config["store"] = {**config["store"], **form}
    return signed(msgspec.structs.replace(record, config=config))


def copy_plan(root: Path, out: Path, seal: Seal) -> None:
    expected = seal.plan_file.sha256
    if (out / PLAN_FILE).is_file() and file_sha256(out / PLAN_FILE) == expected:
        return
    with (root / PLAN_FILE).open("rb") as plan, publish(out / PLAN_FILE) as stream:
        shutil.copyfileobj(plan, stream)
    if file_sha256(out / PLAN_FILE) != expected:
        withdraw(out / PLAN_FILE)
        command = f"cache-store verify {shlex.quote(str(root))}"
        raise CacheError(f"{root} is damaged: {PLAN_FILE} is not the one sealed; run `{command}`")


def write_unless_equal(path: Path, data: bytes) -> None:
    if not path.is_file() or path.read_bytes() != data:
        write_file(path, data)


def convert_shards(source: CacheFolder, target: CacheFolder, progress: Callable[[int], object]) -> tuple[int, int]:
    """Convert the missing shards; return how many those were, and how many were there already."""
    converter, converted = ShardConverter(source, target, progress), 0
    for shard, content in enumerate(read_contents(source.root, source.spec)):
        if is_kept(target, content):
            progress(len(source.spec.shard_rows(shard)))
            continue
        withdraw(target.root / SEAL_FILE)
        record = read_commit(source.root, shard)
        assert record is not None
        converter.convert(record)
        converted += 1
    return converted, source.spec.num_shards - converted


def is_kept(target: CacheFolder, content: CommitContent) -> bool:
    """Whether the target has this shard already; StaleError where it has another cache's."""
    record, problem = kept_record(target.root, target.spec, content.shard)
    if problem is not None:
        print(f"cache-store: damage found, shard {content.shard} is converted again: {problem}", file=sys.stderr)
    elif record is not None:
        refuse_other_content(target, record, content)
        return True
    return False


def refuse_other_content(target: CacheFolder, record: CommitRecord, content: CommitContent) -> None:
    """Raise StaleError where the shard was converted from other latents or samples."""
    found = msgspec.structs.replace(record.content, files=())
    expected = msgspec.structs.replace(content, files=(), recipe=record.content.recipe)
    if differences := differing(*(msgspec.to_builtins(each) for each in (found, expected))):
        refuse(f"{target.root} holds a shard {content.shard} of another cache", differences, [OTHER_FOLDER])


def seal_copy(target: CacheFolder, source_seal: Seal) -> Seal:
    """Seal the new cache, with the statistics copied: another machine would round them differently."""
    seal = make_seal(target.spec, read_contents(target.root, target.spec), source_seal.plan_file)
    array = msgspec.structs.replace(source_seal.array, bytes=seal.array.bytes)
    seal = signed(msgspec.structs.replace(seal, array=array))
    write_unless_equal(target.root / SEAL_FILE, canonical_json(seal))
    return seal
