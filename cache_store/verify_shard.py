"""Checking one shard: its record, its files, every sample in it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_store.checksum import crc32c
from cache_store.codec import decode_sample
from cache_store.errors import CacheError
from cache_store.findings import Finding, Level
from cache_store.formats import Location, shard_format
from cache_store.metadata import read_commit
from cache_store.plan import DIGESTED, PlanFile, plan_digest
from cache_store.publish import file_sha256
from cache_store.reader import map_file
from cache_store.schema import (
    CACHED,
    DTYPES,
    REJECTED,
    SAMPLES_SCHEMA,
    CommitContent,
    FileRecord,
    Spec,
    commit_file,
    rows_digest,
    samples_file,
)
from cache_store.tables import read_table

UNCOMMITTED = "is missing: the shard is not committed"


class ShardVerifier:
    """Checks the shards of one array, one at a time; `plan` is None where the plan itself cannot be read."""

    def __init__(self, root: Path, spec: Spec, array: str, level: Level, plan: PlanFile | None) -> None:
        self._root, self._spec, self._array, self._level, self._plan = root, spec, array, level, plan

    def check(self, shard: int) -> tuple[CommitContent | None, list[Finding]]:
        """The shard's record and what is wrong with the shard."""
        name = commit_file(self._array, shard)
        try:
            record = read_commit(self._root, self._array, shard)
        except CacheError as error:
            return None, [Finding(shard=shard, file=name, problem=str(error))]
        if record is None:
            return None, [Finding(shard=shard, file=name, problem=UNCOMMITTED)]
        findings = [*content_findings(self._spec, self._array, shard, record.content)]
        for file in record.content.files:
            found = file_finding(self._root, file, self._level, shard)
            findings.extend([found] if found else [])
        if self._level == "full":
            findings.extend(self._sample_findings(record.content))
        return record.content, findings

    def _sample_findings(self, content: CommitContent) -> Iterator[Finding]:
        """Damage inside the shard, named by row."""
        shard, name = content.shard, samples_file(content.shard)
        try:
            samples = read_table(self._root / name)
        except CacheError as error:
            yield Finding(shard=shard, file=name, problem=str(error))
            return
        if samples.schema != SAMPLES_SCHEMA:
            yield Finding(shard=shard, file=name, problem="has other columns than the format's")
            return
        yield from table_findings(content, samples)
        yield from self._plan_findings(content, samples)
        yield from self._value_findings(content, samples)

    def _plan_findings(self, content: CommitContent, samples: pa.Table) -> Iterator[Finding]:
        """Silent where the plan cannot be read, which is a finding of its own."""
        if self._plan is None:
            return
        try:
            planned = self._plan.shard(content.shard, list(DIGESTED))
        except CacheError:
            return
        if not samples.select(planned.column_names).equals(planned):
            name = samples_file(content.shard)
            yield Finding(shard=content.shard, file=name, problem="rows, ids or texts are not the plan's")
        if content.plan_digest != plan_digest([planned]):
            name = commit_file(content.array, content.shard)
            yield Finding(shard=content.shard, file=name, problem="was made for other samples than the plan's")

    def _value_findings(self, content: CommitContent, samples: pa.Table) -> Iterator[Finding]:
        """Each sample's crc32c, decoding and values, and the shard's own structure."""
        spec, file = self._spec, shard_format(self._spec).shard_file(content.array, content.shard)
        try:
            data = map_file(self._root / file)
        except (OSError, ValueError):
            return  # absent or empty, which the file's own finding says
        rows, locations = samples["row"].to_pylist(), read_locations(samples)
        for row, location in zip(rows, locations, strict=True):
            if problem := location and sample_problem(data, location, spec, content.array):
                yield Finding(shard=content.shard, row=row, file=file, problem=problem)
        structure = shard_format(spec).structure_problems(data, spec, content.array, content.shard, samples, locations)
        for slot, problem in structure:
            row = None if slot is None or slot >= len(rows) else rows[slot]
            yield Finding(shard=content.shard, row=row, file=file, problem=problem)


def content_findings(spec: Spec, array: str, shard: int, content: CommitContent) -> Iterator[Finding]:
    name = commit_file(array, shard)
    expected_files = (shard_format(spec).shard_file(array, shard), samples_file(shard))
    claims = {
        "array": (content.array, array),
        "shard": (content.shard, shard),
        "recipe digest": (content.recipe_digest, spec.recipe_digest),
        "files": (tuple(file.path for file in content.files), expected_files),
        "planned samples": (content.cached + content.rejected, len(spec.shard_rows(shard))),
        "reasons": (sum(content.reasons.values()), content.rejected),
    }
    for claim, (found, expected) in claims.items():
        if found != expected:
            yield Finding(shard=shard, file=name, problem=f"{claim}: expected {expected}, found {found}")


def file_finding(root: Path, file: FileRecord, level: Level, shard: int | None = None) -> Finding | None:
    path = root / file.path
    if not path.is_file():
        problem = "is missing"
    elif path.stat().st_size != file.bytes:
        problem = f"is {path.stat().st_size} bytes, expected {file.bytes}"
    elif level == "full" and (found := file_sha256(path)) != file.sha256:
        problem = f"sha256 is {found[:12]}…, expected {file.sha256[:12]}…"
    else:
        return None
    return Finding(shard=shard, file=file.path, problem=problem)


def table_findings(content: CommitContent, samples: pa.Table) -> Iterator[Finding]:
    shard, name = content.shard, samples_file(content.shard)
    digest = rows_digest(*(samples[column].to_pylist() for column in ("row", "id", "content_sha256")))
    if digest != content.rows_digest:
        yield Finding(shard=shard, file=name, problem="ids or contents do not match the commit record")
    counts = {each["values"]: each["counts"] for each in pc.value_counts(samples["status"]).to_pylist()}
    expected = {CACHED: content.cached, REJECTED: content.rejected}
    if counts != {status: count for status, count in expected.items() if count}:
        yield Finding(shard=shard, file=name, problem=f"counts {counts}, the commit record {expected}")


def read_locations(samples: pa.Table) -> list[Location | None]:
    columns = [samples[name].to_pylist() for name in Location._fields]
    return [None if None in values else Location(*values) for values in zip(*columns, strict=True)]


def sample_problem(data: memoryview, location: Location, spec: Spec, array: str) -> str | None:
    """What is wrong with one sample's bytes, or None."""
    offset, length, checksum = location
    if offset < 0 or length < 1 or offset + length > len(data):
        return f"lies at bytes [{offset}, {offset + length}), the file has {len(data)}"
    payload = data[offset : offset + length]
    if (found := crc32c(payload)) != checksum:
        return f"crc32c is {found:08x}, expected {checksum:08x}"
    target = np.empty(spec.arrays[array].sample_bytes, np.uint8)
    try:
        decode_sample(payload, spec.arrays[array].codec, target)
    except ValueError as error:
        return str(error)
    if count := count_non_finite(target, spec.arrays[array].dtype):
        return f"holds {count} non-finite values"
    return None


def count_non_finite(values: np.ndarray, dtype: str) -> int:
    """In uint8 [bytes] seen as `dtype`: a value is not finite where all its exponent bits are set (IEEE 754)."""
    exponent = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}[dtype]
    bits = values.view(f"<u{DTYPES[dtype].itemsize}")
    return int(np.count_nonzero((bits & exponent) == exponent))
