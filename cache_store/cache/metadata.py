"""Reading and writing a cache's records: the spec, the commit records, the seal."""

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from cache_store.errors import CacheError, NoCacheError
from cache_store.format.formats import shard_format
from cache_store.format.record import FORMAT_VERSION, canonical_json, parse_signed, refuse_version, signed
from cache_store.format.schema import (
    BUILD_FILE,
    COMMITS,
    MAX_SAMPLE_BYTES,
    MAX_SHARDS,
    PLAN_FILE,
    SEAL_FILE,
    SPEC_ATTRIBUTE,
    SPEC_FILE,
    ZARR_ARRAY,
    BuildRecord,
    CommitRecord,
    Seal,
    Spec,
    commit_file,
)
from cache_store.storage.claim import refuse_foreign_names
from cache_store.storage.publish import write_file
from cache_store.storage.regular_file import read_regular

BEFORE_THE_SPEC = {BUILD_FILE, PLAN_FILE, ZARR_ARRAY}
"""What a writer that died before the spec may leave, claim and scratch files aside."""


def has_cache(root: Path) -> bool:
    """Whether the folder holds a cache, be it one that has lost its spec."""
    return any((root / name).exists() for name in (SPEC_FILE, SEAL_FILE, COMMITS))


def refuse_foreign_folder(root: Path, option: str) -> None:
    """ConfigError, naming the option, where `root` is no folder or holds something else than a cache."""
    if not has_cache(root):
        refuse_foreign_names(root, BEFORE_THE_SPEC, option, "cache")


def refuse_no_cache(root: Path) -> None:
    """NoCacheError where nothing of a cache is, be it for want of the folder."""
    if not has_cache(root):
        raise NoCacheError(f"{root} holds no cache; make one with `precompute build`")


def read_spec(root: Path) -> Spec:
    """The spec, from the group's attributes; refuses other versions and a file that the spec does not account for."""
    refuse_no_cache(root)
    where = str(root / SPEC_FILE)
    try:
        data = read_regular(root / SPEC_FILE)
    except FileNotFoundError:
        raise CacheError(f"{where} is missing; rerun `precompute build` to restore it") from None
    return parse_checked_spec(data, where)


def parse_checked_spec(data: bytes, where: str) -> Spec:
    """The spec that a group holds; CacheError for a group that is not the one of its own spec."""
    spec = parse_spec(data, where)
    refuse_invalid(spec, where)
    if shard_format(spec).metadata(spec)[SPEC_FILE] != data:
        raise CacheError(f"{where} was edited or damaged: it is not what its own spec says it should be")
    return spec


def parse_spec(data: bytes, where: str) -> Spec:
    try:
        raw = msgspec.json.decode(data)["attributes"][SPEC_ATTRIBUTE]
        version = raw["format_version"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        raise CacheError(f"{where} is not the group of a cache: no attribute {SPEC_ATTRIBUTE!r}") from None
    refuse_version(version, where)
    try:
        return msgspec.convert(raw, Spec, strict=True)
    except msgspec.ValidationError as error:
        raise CacheError(f"{where} holds no valid spec: {error}") from None


def spec_problems(spec: Spec) -> list[str]:
    """What a reader would refuse: a field's own bounds, and those between fields that later arithmetic relies on."""
    try:
        msgspec.convert(msgspec.to_builtins(spec), Spec, strict=True)
    except msgspec.ValidationError as error:
        return [str(error)]
    problems = []
    if spec.num_shards > MAX_SHARDS:
        problems.append(f"{spec.num_shards:,} shards, more than {MAX_SHARDS:,}; take more samples per shard")
    if spec.array.sample_bytes > MAX_SAMPLE_BYTES:
        problems.append(f"{spec.array.sample_bytes:,} bytes a sample, more than {MAX_SAMPLE_BYTES:,}")
    if problem := shard_format(spec).unsupported(spec.array.dtype, spec.array.codec):
        problems.append(problem)
    return problems


def refuse_invalid(spec: Spec, where: str) -> None:
    if problems := spec_problems(spec):
        raise CacheError(f"{where} holds no valid spec: {'; '.join(problems)}")


def write_spec(root: Path, spec: Spec) -> None:
    """Write every metadata file; the group, which makes the folder a cache, comes last."""
    refuse_invalid(spec, str(root / SPEC_FILE))
    files = shard_format(spec).metadata(spec)
    for name in sorted(files, key=lambda name: name == SPEC_FILE):
        write_file(root / name, files[name])


def read_commit(root: Path, shard: int) -> CommitRecord | None:
    """A shard's record, or None where the shard is not committed."""
    path = root / commit_file(shard)
    with contextlib.suppress(FileNotFoundError):
        return parse_signed(CommitRecord, read_regular(path), str(path))
    return None


def write_commit(root: Path, record: CommitRecord) -> None:
    content = record.content
    write_file(root / commit_file(content.shard), canonical_json(record))


def read_seal(root: Path) -> Seal:
    path = root / SEAL_FILE
    try:
        data = read_regular(path)
    except FileNotFoundError:
        raise CacheError(f"{root} is not sealed: its build has not finished; rerun `precompute build`") from None
    return parse_signed(Seal, data, str(path))


def write_build(root: Path, config: dict[str, Any]) -> None:
    """Keep what the cache was built from, so that later programs find sources and encoder by themselves."""
    record = signed(BuildRecord(format_version=FORMAT_VERSION, config=config, sha256=""))
    write_file(root / BUILD_FILE, canonical_json(record))


def read_build(root: Path) -> BuildRecord:
    path = root / BUILD_FILE
    try:
        return parse_signed(BuildRecord, read_regular(path), str(path))
    except FileNotFoundError:
        raise CacheError(f"{path} is missing; rerun `precompute build` to restore it") from None
