"""Reading and writing a cache's records: the spec, the commit records, the seal."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cache_store.errors import CacheError, ConfigError, NoCacheError, OlderFormatError
from cache_store.format.formats import shard_format
from cache_store.format.names import (
    BUILD_FILE,
    COMMITS,
    PLAN_FILE,
    SEAL_FILE,
    SPEC_ATTRIBUTE,
    SPEC_FILE,
    ZARR_ARRAY,
    commit_file,
)
from cache_store.format.record import (
    FORMAT_VERSION,
    LACKS,
    NO_JSON,
    RecordT,
    canonical_json,
    misfit,
    no_json,
    parse_signed,
    refuse_version,
    signed,
)
from cache_store.format.schema import MAX_SAMPLE_BYTES, MAX_SHARDS, BuildRecord, CommitRecord, Listed, Seal, Spec
from cache_store.refusal import MADE_BY, SEALED_BY
from cache_store.storage.store import Address, Store, is_url, open_store
from cache_store.storage.verbs import read_only

BEFORE_THE_SPEC = {BUILD_FILE, PLAN_FILE, ZARR_ARRAY}
"""What a writer that died before the spec may leave, claim and scratch files aside."""


def has_cache(store: Store) -> bool:
    """Whether there is a cache, be it one that has lost its spec."""
    return any(map(store.has, (SPEC_FILE, SEAL_FILE, COMMITS)))


def refuse_others(store: Store, option: str) -> None:
    """ConfigError, naming the option, where no cache can lie, or something else than a cache does."""
    if store.is_read_only:
        raise read_only(f"{option}: {store}")
    if not has_cache(store):
        for outer in map(open_store, places_above(store)):
            with contextlib.suppress(PermissionError):  # who may write to a folder may see nothing of those above it
                if outer.has(PLAN_FILE) and outer.has(SPEC_FILE):
                    raise ConfigError(f"{option}: {store} lies in the cache {outer}; name a place outside of it")
        store.refuse_others(BEFORE_THE_SPEC, option, "cache")


def places_above(store: Store) -> Sequence[str | Path]:
    """The folders that a store lies in."""
    if not is_url(store):
        return Path(str(store)).resolve().parents
    scheme, _, place = str(store).partition("://")
    parts = place.split("/")
    return [f"{scheme}://{'/'.join(parts[:count])}" for count in range(len(parts) - 1, 0, -1)]


def refuse_no_cache(store: Store) -> None:
    """NoCacheError where nothing of a cache is, be it for want of the folder."""
    if not has_cache(store):
        raise NoCacheError(f"{store} holds no cache; make one with `precompute build`")


def read_spec(cache: Address) -> Spec:
    """The spec, from the group's attributes; refuses other versions and a file that the spec does not account for."""
    refuse_no_cache(store := open_store(cache))
    where = store.where(SPEC_FILE)
    try:
        data = store.read(SPEC_FILE, Spec.max_bytes)
    except FileNotFoundError:
        raise CacheError(f"{where} is missing; rerun `precompute build` to restore it") from None
    return parse_checked_spec(data, where)


def parse_checked_spec(data: bytes, where: str) -> Spec:
    """The spec that a group holds; CacheError for a group that is not the one of its own spec."""
    spec = parse_spec(data, where)
    if problems := spec_problems(spec):
        raise CacheError(f"{where} holds no valid spec: {'; '.join(problems)}")
    if shard_format(spec).metadata()[SPEC_FILE] != data:
        raise CacheError(f"{where} was edited or damaged: it is not what its own spec says it should be")
    return spec


def parse_spec(data: bytes, where: str) -> Spec:
    try:
        raw = msgspec.json.decode(data)["attributes"][SPEC_ATTRIBUTE]
        version = raw["format_version"]
    except NO_JSON:
        raise no_json(data, where) from None
    except (KeyError, TypeError):
        raise CacheError(f"{where} is not the group of a cache: no attribute {SPEC_ATTRIBUTE!r}") from None
    refuse_version(version, where)
    try:
        return msgspec.convert(raw, Spec, strict=True)
    except msgspec.ValidationError as error:
        problem = misfit(error)
        if not problem.startswith(LACKS):
            raise CacheError(f"{where} holds no valid spec: {problem}") from None
        raise OlderFormatError(
            f"{where} holds no valid spec: {problem}, as if an earlier version had made the cache; no command makes it "
            "current: build it anew, as with `precompute build … --cache NEW`"
        ) from None


def spec_problems(spec: Spec) -> list[str]:
    """What a reader would refuse: a field's own bounds, and those between fields that later arithmetic relies on."""
    try:
        msgspec.convert(msgspec.to_builtins(spec), Spec, strict=True)
    except msgspec.ValidationError as error:
        return [misfit(error)]
    problems = []
    if spec.num_shards > MAX_SHARDS:
        problems.append(f"{spec.num_shards:,} shards, more than {MAX_SHARDS:,}; take more samples per shard")
    if spec.array.sample_bytes > MAX_SAMPLE_BYTES:
        problems.append(f"{spec.array.sample_bytes:,} bytes a sample, more than {MAX_SAMPLE_BYTES:,}")
    if problem := shard_format(spec).unsupported(spec.array.dtype, spec.array.codec):
        problems.append(problem)
    return problems


def read_commit(cache: Address, shard: int) -> CommitRecord | None:
    """A shard's record, or None where the shard is not committed."""
    with contextlib.suppress(FileNotFoundError):
        return read_record(CommitRecord, open_store(cache), commit_file(shard))
    return None


def read_seal(cache: Address) -> Seal:
    store = open_store(cache)
    try:
        return read_record(Seal, store, SEAL_FILE)
    except FileNotFoundError:
        raise CacheError(f"{store} is not sealed: rerun the {SEALED_BY}") from None


def read_build(cache: Address) -> BuildRecord:
    store = open_store(cache)
    try:
        return read_record(BuildRecord, store, BUILD_FILE)
    except FileNotFoundError:
        where = store.where(BUILD_FILE)
        raise CacheError(f"{where} is missing; rerun the {MADE_BY} to restore it") from None


def read_record(record_class: type[RecordT], store: Store, name: str) -> RecordT:
    return parse_signed(record_class, store.read(name, record_class.max_bytes), store.where(name))


def write_build(cache: Address, config: dict[str, Any], listed: Listed | None = None) -> None:
    """Keep what the cache was built from, so that later programs find sources and encoder by themselves."""
    record = signed(BuildRecord(format_version=FORMAT_VERSION, config=config, listed=listed, sha256=""))
    open_store(cache).put_whole(BUILD_FILE, canonical_json(record))


def metadata_of(spec: Spec) -> list[tuple[str, bytes]]:
    """Name and bytes of every file that the spec determines; the group, which makes the folder a cache, comes last."""
    return sorted(shard_format(spec).metadata().items(), key=lambda file: file[0] == SPEC_FILE)
