"""Read and write a cache's records (spec, commit records, build record, seal) and its Parquet tables."""

import base64
import contextlib
import hashlib
import io
import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cache_store.errors import CacheError, ConfigError, NoCacheError, OlderFormatError
from cache_store.format.array import MAX_SAMPLE_BYTES
from cache_store.format.formats import shard_format
from cache_store.format.layout import (
    BUILD_FILE,
    COMMITS,
    PLAN_FILE,
    REJECTED_FILE,
    SEAL_FILE,
    SIZES,
    SPEC_ATTRIBUTE,
    SPEC_FILE,
    ZARR_ARRAY,
    commit_file,
    samples_file,
)
from cache_store.format.plan import PlanFile, encode_plan
from cache_store.format.record import (
    FORMAT_VERSION,
    JSON_ERRORS,
    MISSING_FIELD,
    RecordT,
    canonical_json,
    describe_mismatch,
    not_json_error,
    parse_signed,
    refuse_version,
    sign,
)
from cache_store.format.schema import (
    MAX_SAMPLES_PER_SHARD,
    MAX_SHARDS,
    BuildRecord,
    CommitContent,
    CommitRecord,
    FileRecord,
    Listed,
    Seal,
    Spec,
)
from cache_store.format.sums import ShardSums
from cache_store.format.tables import (
    MAX_FOOTER_BYTES,
    MAX_PLAN_FOOTER_BYTES,
    REJECTED,
    REJECTED_SCHEMA,
    SUMS_KEY,
    TableFile,
    refuse_large_footer,
)
from cache_store.messages import MADE_BY, SEALED_BY
from cache_store.storage.files import stream_sha256
from cache_store.storage.protocol import read_only_error
from cache_store.storage.store import Address, Store, is_url, map_calls, open_store

BEFORE_THE_SPEC = {BUILD_FILE, PLAN_FILE, SIZES, ZARR_ARRAY}
"""Files that a writer may leave if it dies before it writes the spec, besides claim and scratch files."""


def has_cache(store: Store) -> bool:
    """Return whether the store holds a cache, even one that has lost its spec."""
    return any(map(store.has, (SPEC_FILE, SEAL_FILE, COMMITS)))


def refuse_foreign_place(store: Store, option: str) -> None:
    """Raise ConfigError, naming the option, if the place is in another cache, is not a folder or holds other files."""
    if store.is_read_only:
        raise read_only_error(f"{option}: {store}")
    if not has_cache(store):
        for outer in map(open_store, places_above(store)):
            with contextlib.suppress(PermissionError):  # a user may lack permission to read the folders above
                if outer.has(PLAN_FILE) and outer.has(SPEC_FILE):
                    raise ConfigError(f"{option}: {store} lies inside the cache {outer}; name a place outside it")
        store.refuse_foreign_names(BEFORE_THE_SPEC, option, "cache")


def places_above(store: Store) -> Sequence[str | Path]:
    """List the folders above a store, nearest first."""
    if not is_url(store):
        return Path(str(store)).resolve().parents
    scheme, _, place = str(store).partition("://")
    parts = place.split("/")
    return [f"{scheme}://{'/'.join(parts[:count])}" for count in range(len(parts) - 1, 0, -1)]


def refuse_no_cache(store: Store) -> None:
    """Raise NoCacheError if the store holds no part of a cache, or does not exist."""
    if not has_cache(store):
        raise NoCacheError(f"{store} holds no cache; make one with `precompute build`")


def read_spec(cache: Address) -> Spec:
    """Read the spec from the group's attributes; CacheError for an unknown version or a group that was edited."""
    refuse_no_cache(store := open_store(cache))
    where = store.where(SPEC_FILE)
    try:
        data = store.read(SPEC_FILE, Spec.max_bytes)
    except FileNotFoundError:
        raise CacheError(f"{where} is missing; rerun `precompute build` to restore it") from None
    return parse_checked_spec(data, where)


def parse_checked_spec(data: bytes, where: str) -> Spec:
    """Parse the spec in a group; CacheError if the group's bytes are not those that the spec determines."""
    spec = parse_spec(data, where)
    if problems := spec_problems(spec):
        raise CacheError(f"{where} holds no valid spec: {'; '.join(problems)}")
    if shard_format(spec).metadata()[SPEC_FILE] != data:
        raise CacheError(f"{where} was edited or damaged: its bytes do not match its own spec")
    return spec


def parse_spec(data: bytes, where: str) -> Spec:
    try:
        raw = msgspec.json.decode(data)["attributes"][SPEC_ATTRIBUTE]
        version = raw["format_version"]
    except JSON_ERRORS:
        raise not_json_error(data, where) from None
    except (KeyError, TypeError):
        raise CacheError(f"{where} is not the group of a cache: no attribute {SPEC_ATTRIBUTE!r}") from None
    refuse_version(version, where)
    try:
        return msgspec.convert(raw, Spec, strict=True)
    except msgspec.ValidationError as error:
        problem = describe_mismatch(error)
        if not problem.startswith(MISSING_FIELD):
            raise CacheError(f"{where} holds no valid spec: {problem}") from None
        raise OlderFormatError(
            f"{where} holds no valid spec: {problem}; an earlier version probably made the cache. No command "
            "converts it: build it again, for example with `precompute build … --cache NEW`"
        ) from None


def spec_problems(spec: Spec) -> list[str]:
    """List what a reader would refuse: fields out of bounds, too many or too long shards, samples too large or of no
    size, an unsupported array.
    """
    try:
        msgspec.convert(msgspec.to_builtins(spec), Spec, strict=True)
    except msgspec.ValidationError as error:
        return [describe_mismatch(error)]
    problems = []
    if spec.num_shards > MAX_SHARDS:
        problems.append(f"{spec.num_shards:,} shards, more than {MAX_SHARDS:,}; take more samples per shard")
    if (longest := max(run.rows for run in spec.shards)) > spec.samples_per_shard:
        problems.append(f"a shard of {longest:,} rows, more than samples_per_shard {spec.samples_per_shard:,}")
    if unknown := sorted({run.array for run in spec.shards} - {*spec.names}):
        problems.append(f"a shard of array {unknown[0]}, which is not listed")
    if len({*spec.names}) < len(spec.arrays):
        problems.append("two arrays of one size")
    try:
        most = max(array.sample_bytes for array in spec.sized_arrays)
        if most > MAX_SAMPLE_BYTES:
            problems.append(f"{most:,} bytes a sample, at most {MAX_SAMPLE_BYTES:,} can be")
    except ValueError as error:
        problems.append(str(error))
    if problem := shard_format(spec).unsupported(spec.array.dtype, spec.array.codec):
        problems.append(problem)
    return problems


def read_commit(cache: Address, shard: int) -> CommitRecord | None:
    """Read a shard's record; None if the shard is not committed."""
    with contextlib.suppress(FileNotFoundError):
        return read_record(CommitRecord, open_store(cache), commit_file(shard))
    return None


def read_seal(cache: Address) -> Seal:
    store = open_store(cache)
    try:
        return read_checked_seal(store)
    except FileNotFoundError:
        raise CacheError(f"{store} is not sealed: rerun the {SEALED_BY}") from None


def read_checked_seal(store: Store) -> Seal:
    """Read the seal; CacheError if no cache can have its spec, FileNotFoundError if there is none."""
    seal = read_record(Seal, store, SEAL_FILE)
    if problems := spec_problems(seal.spec):
        raise CacheError(f"{store.where(SEAL_FILE)} holds no valid spec: {'; '.join(problems)}")
    return seal


def read_build(cache: Address) -> BuildRecord:
    store = open_store(cache)
    try:
        return read_record(BuildRecord, store, BUILD_FILE)
    except FileNotFoundError:
        where = store.where(BUILD_FILE)
        raise CacheError(f"{where} is missing; rerun the {MADE_BY} to restore it") from None


def read_record(record_class: type[RecordT], store: Store, name: str) -> RecordT:
    return parse_signed(record_class, store.read(name, record_class.max_bytes), store.where(name))


def write_build(
    cache: Address,
    config: dict[str, Any],
    listed: Listed | None = None,
    withdrawing: Iterable[str] = (),
    *,
    spec_digest: str = "",
) -> None:
    """Write what the cache was built from, so that later programs find sources and encoder without being told."""
    record = BuildRecord(
        format_version=FORMAT_VERSION,
        config=config,
        spec_digest=spec_digest,
        listed=listed,
        withdrawing=tuple(withdrawing),
        sha256="",
    )
    open_store(cache).put_whole(BUILD_FILE, canonical_json(sign(record)))


def metadata_of(spec: Spec) -> list[tuple[str, bytes]]:
    """List name and bytes of every file that the spec determines; the group is last: it makes the folder a cache."""
    return sorted(shard_format(spec).metadata().items(), key=lambda file: file[0] == SPEC_FILE)


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


def write_plan(store: Store, spec: Spec, shards: Iterable[pa.Table]) -> None:
    """Write the plan of a cache, whose rows `shards` has, cut as the spec says; CacheError if it is too large."""
    with store.draft(PLAN_FILE) as draft:
        encode_plan(draft.stream, shards, (spec.names[array] for array in spec.array_indices))
        draft.finish()
        TableFile(lambda: pa.BufferReader(draft.map()), store.where(PLAN_FILE), MAX_PLAN_FOOTER_BYTES)
        draft.publish()


def read_samples(cache: Address, shard: int, columns: list[str] | None = None) -> pa.Table:
    return open_table(open_store(cache), samples_file(shard)).whole(columns)


def read_sums(store: Store, spec: Spec, content: CommitContent) -> ShardSums | None:
    """Read a shard's sums from the footer of its samples table; CacheError if the record has another digest."""
    if content.sums is None:
        return None
    name = samples_file(content.shard)
    stated = (open_table(store, name).metadata.metadata or {}).get(SUMS_KEY.encode(), b"")
    try:
        data = base64.b64decode(stated, validate=True)
        if hashlib.sha256(data).hexdigest() != content.sums:
            raise ValueError("has sums that its record does not name")
        return ShardSums.of_data(data, spec.array.features)
    except ValueError as error:
        where = shlex.quote(str(store))
        raise CacheError(
            f"{store.where(name)} {error}; run `precompute repair {where} --shards '[{content.shard}]'`"
        ) from None


def sums_of(store: Store, spec: Spec, contents: Sequence[CommitContent]) -> list[ShardSums | None]:
    return [*map_calls(store, partial(read_sums, store, spec), contents)]


def write_rejected(store: Store, spec: Spec, contents: Iterable[CommitContent]) -> FileRecord:
    """Write rejected.parquet from the samples tables of shards with rejected rows; return the file's record."""
    lacking = [content.shard for content in contents if content.rejected]
    tables = map_calls(store, partial(rejected_rows, store), lacking)
    table = pa.concat_tables([REJECTED_SCHEMA.empty_table(), *tables]).combine_chunks()
    pq.write_table(table, stream := io.BytesIO(), compression="zstd", row_group_size=MAX_SAMPLES_PER_SHARD)
    data = stream.getvalue()
    record = record_bytes(REJECTED_FILE, data)
    if not store.has(REJECTED_FILE) or stored_sha256(store, REJECTED_FILE) != record.sha256:
        store.put_whole(REJECTED_FILE, data)
    return record


def rejected_rows(store: Store, shard: int) -> pa.Table:
    table = read_samples(store, shard, ["row", "status", "reason"])
    return table.filter(pc.equal(table["status"], REJECTED)).select(REJECTED_SCHEMA.names)


def stored_sha256(store: Store, name: str) -> str:
    with store.open(name) as stream:
        return stream_sha256(stream)


def file_record(store: Store, name: str) -> FileRecord:
    return FileRecord(path=name, bytes=store.size(name), sha256=stored_sha256(store, name))


def record_bytes(name: str, data: bytes | memoryview) -> FileRecord:
    """Make the record of a file that holds these bytes."""
    return FileRecord(path=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
