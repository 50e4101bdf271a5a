"""Read and write a cache's records (spec, commit records, build record, seal) and its Parquet tables."""

import base64
import contextlib
import hashlib
import io
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cache_store.errors import CacheError, ConfigError, NoCacheError, OlderFormatError
from cache_store.format.array import MAX_SAMPLE_BYTES
from cache_store.format.formats import shard_format
from cache_store.format.layout import (
    BUILD_FILE,
    COMMITS,
    PLAN,
    REJECTED_FILE,
    SEAL_FILE,
    SHARDS_FILE,
    SPEC_ATTRIBUTE,
    SPEC_FILE,
    TEXTS,
    TEXTS_FILE,
    ZARR_ARRAY,
    commit_file,
    part_file,
    samples_file,
    texts_file,
)
from cache_store.format.plan import (
    PartDigests,
    Plan,
    PlanPart,
    extra_columns,
    refuse_other_texts,
    texts_digest,
    write_part,
    write_texts,
)
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
from cache_store.format.roll import ENTRY, Roll
from cache_store.format.schema import (
    MAX_SAMPLES_PER_SHARD,
    MAX_SHARDS,
    BuildRecord,
    CommitContent,
    CommitRecord,
    FileRecord,
    Listed,
    PartTexts,
    Seal,
    Spec,
    Texts,
)
from cache_store.format.sums import ShardSums
from cache_store.format.tables import (
    EXTRA_TYPES,
    MAX_FOOTER_BYTES,
    MAX_PART_FOOTER_BYTES,
    NO_VALUES,
    REAL,
    REJECTED,
    REJECTED_SCHEMA,
    SUMS_KEY,
    WHOLE,
    TableFile,
    refuse_large_footer,
)
from cache_store.messages import MADE_BY, SEALED_BY
from cache_store.storage.files import stream_sha256
from cache_store.storage.protocol import read_only_error
from cache_store.storage.store import Address, Store, is_url, map_calls, open_store

BEFORE_THE_SPEC = {BUILD_FILE, PLAN, TEXTS, TEXTS_FILE, ZARR_ARRAY}
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
                if outer.has(part_file(0)) and outer.has(SPEC_FILE):
                    raise ConfigError(f"{option}: {store} lies inside the cache {outer}; name a place outside it")
        store.refuse_foreign_names(BEFORE_THE_SPEC, option, "cache")


def places_above(store: Store) -> Sequence[str | Path]:
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
    """List what a reader would refuse of a spec."""
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
    ends = np.cumsum([part.shards for part in spec.parts])
    if spec.num_shards != ends[-1] or [part.rows for part in spec.parts] != np.diff([0, *spec.bounds[ends]]).tolist():
        problems.append("parts that do not hold the rows of the shards")
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
    names = [file.path for file in (*seal.plan_files, seal.rejected_file, seal.shards_file)]
    if names != [*map(part_file, range(len(seal.spec.parts))), REJECTED_FILE, SHARDS_FILE]:
        raise CacheError(f"{store.where(SEAL_FILE)} does not name the cache's files")
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
    return TableFile(partial(store.open, name), store.where(name), max_footer_bytes)


def open_part(store: Store, part: int) -> PlanPart:
    return PlanPart(open_table(store, part_file(part), MAX_PART_FOOTER_BYTES))


def open_plan(address: Address, spec: Spec | None = None) -> Plan:
    """Open the plan, whose parts must be those of the spec, or without one are those of its folder."""
    store = open_store(address)
    if spec is None:
        shards, opened = [open_part(store, part).num_shards for part in range(count_parts(store))], open_part
    else:
        shards, opened = [part.shards for part in spec.parts], partial(open_planned_part, spec)
    in_force = cache(partial(read_texts, store))  # those in force when they are first asked for stay

    def open_texts_of(part: int) -> TableFile:
        texts = in_force().parts
        if part >= len(texts):
            raise CacheError(f"{store.where(TEXTS_FILE)} has the texts of {len(texts)} parts, the plan more")
        return open_texts(store, part, texts[part])

    return Plan(shards, partial(opened, store), open_texts_of, in_force)


def open_planned_part(spec: Spec, store: Store, number: int) -> PlanPart:
    part = open_part(store, number)
    if part.stated != spec.parts[number]:
        raise CacheError(f"{part.where} is not the planned one; run: precompute repair {shlex.quote(str(store))}")
    return part


def count_parts(store: Store) -> int:
    """Count the parts whose files are there, up to the first that is not; CacheError if there are none."""
    names = {name for name in store.list(PLAN) if not name.startswith(".")}
    count = next(part for part in range(len(names) + 1) if part_file(part).removeprefix(f"{PLAN}/") not in names)
    if not count:
        raise CacheError(f"{store.where(part_file(0))} is missing")
    return count


def open_texts(store: Store, part: int, texts: PartTexts) -> TableFile:
    file = open_table(store, texts.file(part).path, MAX_PART_FOOTER_BYTES)
    refuse_other_texts(file)
    return file


def read_texts(store: Store) -> Texts:
    try:
        return read_record(Texts, store, TEXTS_FILE)
    except FileNotFoundError:
        raise CacheError(f"{store.where(TEXTS_FILE)} is missing") from None


@dataclass(frozen=True, kw_only=True)
class PartOnDisk:
    """A part of the plan as its file has it."""

    file: FileRecord
    digests: PartDigests
    lengths: tuple[int, ...]
    """Rows of each shard."""
    sizes: tuple[str, ...]
    """Name of each shard's array."""
    is_known: bool = True
    """Whether the file is the one that was sealed or listed, or was just written."""


def put_part(store: Store, number: int, shards: Sequence[tuple[pa.Table, str]]) -> PartOnDisk:
    """Write the samples of a part, each shard with the name of its array."""
    with store.draft(name := part_file(number)) as draft:
        digests = write_part(draft.stream, shards)
        draft.finish()
        file = record_bytes(name, draft.map())
        draft.publish()
    lengths, sizes = tuple(len(rows) for rows, _ in shards), tuple(size for _, size in shards)
    return PartOnDisk(file=file, digests=digests, lengths=lengths, sizes=sizes)


def put_texts(store: Store, part: int, shards: Sequence[pa.Table], held: PartTexts | None = None) -> PartTexts:
    """Write the texts of a part, a table a shard, unless they are those `held`; return their entry in texts.json."""
    digest = texts_digest(pa.concat_tables(shards))
    if held and held.digest == digest:
        return held
    with store.draft(name := texts_file(part, digest)) as draft:
        write_texts(draft.stream, shards)
        draft.finish()
        file = record_bytes(name, draft.map())
        draft.publish()
    return PartTexts(digest=digest, bytes=file.bytes, sha256=file.sha256)


def put_in_force(store: Store, parts: Sequence[PartTexts], before: Iterable[PartTexts] = ()) -> None:
    extra = extra_kinds(store, dict(enumerate(parts)))
    texts = Texts(format_version=FORMAT_VERSION, parts=tuple(parts), before=tuple(before), extra=extra, sha256="")
    data = canonical_json(sign(texts))
    if not store.has(TEXTS_FILE) or store.read(TEXTS_FILE, Texts.max_bytes) != data:
        store.put_whole(TEXTS_FILE, data)


def extra_kinds(store: Store, parts: Mapping[int, PartTexts]) -> dict[str, str]:
    """Return what each extra column holds in all these parts together; CacheError if they contradict each other."""
    found = dict[str, dict[str, str]]()
    schemas = map_calls(store, lambda number: open_texts(store, number, parts[number]).schema, [*parts])
    for number, schema in zip(parts, schemas, strict=True):
        for name in extra_columns(schema):
            kind = next(kind for kind, each in EXTRA_TYPES.items() if each == schema.field(name).type)
            found.setdefault(name, {})[kind] = f"part {number}"
    return {name: shared_kind(name, each) for name, each in found.items()}


def shared_kind(name: str, places: Mapping[str, str]) -> str:
    """Return what all values of a column are; `places` has the place of each kind. Whole numbers are numbers, too."""
    kinds = places.keys() - {NO_VALUES}
    if kinds == {WHOLE, REAL}:
        return REAL
    if len(kinds) > 1:
        found = " and ".join(f"{kind} ({place})" for kind, place in sorted(places.items()) if kind in kinds)
        raise CacheError(f"the column {name} is {found}; its values must be of one kind")
    return next(iter(kinds), NO_VALUES)


def read_roll(store: Store, seal: Seal) -> Roll:
    """Map shards.bin; CacheError unless it is the sealed one and fits the seal."""
    file, where = seal.shards_file, store.where(SHARDS_FILE)
    try:
        data = store.read(SHARDS_FILE, MAX_SHARDS * ENTRY.itemsize)
    except (FileNotFoundError, NotADirectoryError):
        raise CacheError(f"{where} is missing") from None
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise CacheError(f"{where} is not as sealed")
    try:
        roll = Roll(data)
    except CacheError as error:
        raise CacheError(f"{where} {error}") from None
    entries = roll.entries
    rows, parts = np.diff(seal.spec.bounds), seal.spec.part_of_shard
    if len(roll) != seal.spec.num_shards:
        raise CacheError(f"{where} has {len(roll):,} shards, the spec {seal.spec.num_shards:,}")
    fits = (entries["rows"] == rows) & (roll.cached <= rows) & (entries["part"] == parts)
    if not (fits & (entries["array"] == seal.spec.array_indices)).all():
        raise CacheError(f"{where} does not have the shards of the spec")
    return roll


def write_roll(store: Store, spec: Spec, contents: Iterable[CommitContent]) -> FileRecord:
    return put_unless_there(store, SHARDS_FILE, Roll.of(spec, contents).data)


def put_unless_there(store: Store, name: str, data: bytes | memoryview) -> FileRecord:
    record = record_bytes(name, data)
    if not store.has(name) or stored_sha256(store, name) != record.sha256:
        store.put_whole(name, bytes(data))
    return record


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


def sums_of(store: Store, spec: Spec, contents: Sequence[CommitContent]) -> Iterator[ShardSums | None]:
    """Read the sums of shards, some at a time: those of 128 channels take 140 KB."""
    for first in range(0, len(contents), at_once := 256):
        yield from map_calls(store, partial(read_sums, store, spec), contents[first : first + at_once])


def write_rejected(store: Store, spec: Spec, contents: Iterable[CommitContent]) -> FileRecord:
    lacking = [content.shard for content in contents if content.rejected]
    tables = map_calls(store, partial(rejected_rows, store), lacking)
    table = pa.concat_tables([REJECTED_SCHEMA.empty_table(), *tables]).combine_chunks()
    pq.write_table(table, stream := io.BytesIO(), compression="zstd", row_group_size=MAX_SAMPLES_PER_SHARD)
    return put_unless_there(store, REJECTED_FILE, stream.getvalue())


def rejected_rows(store: Store, shard: int) -> pa.Table:
    table = read_samples(store, shard, ["row", "status", "reason"])
    return table.filter(pc.equal(table["status"], REJECTED)).select(REJECTED_SCHEMA.names)


def stored_sha256(store: Store, name: str) -> str:
    with store.open(name) as stream:
        return stream_sha256(stream)


def file_record(store: Store, name: str) -> FileRecord:
    return FileRecord(path=name, bytes=store.size(name), sha256=stored_sha256(store, name))


def table_record(store: Store, name: str) -> FileRecord:
    """Make the record of a part's file; CacheError, before it is read whole, if its end is not that of a table."""
    with store.open(name) as stream:
        refuse_large_footer(stream, store.where(name), MAX_PART_FOOTER_BYTES)
        sha256 = stream_sha256(stream)
        return FileRecord(path=name, bytes=stream.tell(), sha256=sha256)


def record_bytes(name: str, data: bytes | memoryview) -> FileRecord:
    return FileRecord(path=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
