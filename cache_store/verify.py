"""Saying whether every byte of a cache is right, and naming what is not.

`quick` reads records and sizes: seconds for thousands of shards. `full` reads every byte: each file's SHA-256, each
sample's crc32c and values, each id against the plan.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from cache_store.codec import decode_sample
from cache_store.errors import CacheError
from cache_store.formats import Location, shard_format
from cache_store.metadata import read_build, read_commit, read_seal, read_spec
from cache_store.plan import plan_digest, read_plan
from cache_store.publish import SCRATCH_SUFFIX, file_sha256
from cache_store.reader import map_file
from cache_store.schema import (
    BUILD_FILE,
    CACHED,
    DTYPES,
    PLAN_FILE,
    REJECTED,
    SAMPLES_SCHEMA,
    SEAL_FILE,
    CommitContent,
    FileRecord,
    Seal,
    Spec,
    commit_file,
    rows_digest,
    samples_file,
)
from cache_store.seal import make_seal

Level = Literal["quick", "full"]

FLOAT_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One piece of damage, named as closely as it can be."""

    file: str
    problem: str
    shard: int | None = None
    row: int | None = None

    def __str__(self) -> str:
        where = "".join(
            f"{name} {value}, " for name, value in (("shard", self.shard), ("row", self.row)) if value is not None
        )
        return f"{where}{self.file}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a verification looked at and found."""

    cache: str
    level: Level
    identity: str | None
    shards: int
    samples: int
    bytes: int
    findings: tuple[Finding, ...]

    def raise_if_damaged(self) -> None:
        """CacheError naming the first few findings."""
        if self.findings:
            shown = "\n".join(f"  {finding}" for finding in self.findings[:5])
            more = f"\n  and {len(self.findings) - 5} more" if len(self.findings) > 5 else ""
            raise CacheError(
                f"{self.cache} is damaged, {len(self.findings)} findings:\n{shown}{more}\n"
                f"  see all with `cache-store verify {self.cache} --level full`"
            )

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def verify(path: str | Path, level: Level = "quick", progress: Callable[[int], object] = lambda shard: None) -> Report:
    """Check a cache; `progress` hears of every shard done. CacheError only where there is no cache to check."""
    root = Path(path)
    spec = read_spec(root)
    findings = [*metadata_findings(root, spec), *stray_findings(root, spec)]
    seal: Seal | None = None
    contents: dict[str, list[CommitContent]] = {}
    try:
        seal = read_seal(root)
    except CacheError as error:
        findings.append(Finding(file=SEAL_FILE, problem=str(error)))
    try:
        read_build(root)
    except CacheError as error:
        findings.append(Finding(file=BUILD_FILE, problem=str(error)))
    for array in spec.arrays:
        contents[array] = []
        for shard in range(spec.num_shards):
            content, found = check_shard(root, spec, array, shard, level)
            findings.extend(found)
            contents[array].extend([content] if content else [])
            progress(shard)
    records_are_sound = not any(finding.file.startswith("commits/") for finding in findings)
    if seal is not None and records_are_sound:
        findings.extend(seal_findings(root, spec, seal, contents, level))
    return Report(
        cache=str(root),
        level=level,
        identity=seal.identity if seal else None,
        shards=spec.num_shards,
        samples=sum(each.cached for each in next(iter(contents.values()))),
        bytes=sum(file.bytes for each in contents.values() for content in each for file in content.files),
        findings=tuple(findings),
    )


def metadata_findings(root: Path, spec: Spec) -> Iterator[Finding]:
    for name, expected in shard_format(spec).metadata(spec).items():
        path = root / name
        if not path.is_file():
            yield Finding(file=name, problem="is missing")
        elif path.read_bytes() != expected:
            yield Finding(file=name, problem="is not what the spec says it should be")


def stray_findings(root: Path, spec: Spec) -> Iterator[Finding]:
    """Shard files, samples and records beyond the plan, and scratch files of a build that died."""
    shards = range(spec.num_shards)
    names = shard_format(spec).shard_file
    known = {samples_file(shard) for shard in shards}
    for array in spec.arrays:
        known.update(commit_file(array, shard) for shard in shards)
        known.update(names(array, shard) for shard in shards)
        known.add(f"{array}/zarr.json")
    for folder in ("samples", "commits", *spec.arrays):
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and name not in known:
                scratch = name.endswith(SCRATCH_SUFFIX)
                yield Finding(file=name, problem="left by a build that died" if scratch else "does not belong here")


def seal_findings(
    root: Path, spec: Spec, seal: Seal, contents: dict[str, list[CommitContent]], level: Level
) -> Iterator[Finding]:
    """Whether the seal is the roll-up of the commit records and of the plan file."""
    plan = file_finding(root, seal.plan_file, level)
    if plan is not None:
        yield plan
        return
    if level == "full" and plan_digest([read_plan(root)]) != spec.plan_digest:
        yield Finding(file=PLAN_FILE, problem="is another plan than the spec's")
    expected = make_seal(root, spec, contents)
    unsigned = [msgspec.to_builtins(msgspec.structs.replace(each, sha256="")) for each in (expected, seal)]
    if not nearly_equal(*unsigned):
        yield Finding(file=SEAL_FILE, problem="is not the roll-up of the commit records")


def nearly_equal(expected: Any, found: Any) -> bool:
    """Equal, floats to rounding: another machine's linear algebra may differ in the last bits of the preview map.

    The seal's own sha256 has been checked when it was read.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(nearly_equal(expected[name], found[name]) for name in found)
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(expected) == len(found) and all(map(nearly_equal, expected, found))
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(expected, found, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    return bool(expected == found)


def check_shard(
    root: Path, spec: Spec, array: str, shard: int, level: Level
) -> tuple[CommitContent | None, list[Finding]]:
    """A shard's record and what is wrong with the shard."""
    name = commit_file(array, shard)
    try:
        record = read_commit(root, array, shard)
    except CacheError as error:
        return None, [Finding(shard=shard, file=name, problem=str(error))]
    if record is None:
        return None, [Finding(shard=shard, file=name, problem="is missing: the shard is not committed")]
    findings = [*content_findings(spec, array, shard, record.content)]
    for file in record.content.files:
        found = file_finding(root, file, level, shard)
        findings.extend([found] if found else [])
    if level == "full":
        findings.extend(sample_findings(root, spec, record.content))
    return record.content, findings


def content_findings(spec: Spec, array: str, shard: int, content: CommitContent) -> Iterator[Finding]:
    name = commit_file(array, shard)
    expected_files = (shard_format(spec).shard_file(array, shard), samples_file(shard))
    claims = {
        "array": (content.array, array),
        "shard": (content.shard, shard),
        "spec digest": (content.spec_digest, spec.digest),
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


def sample_findings(root: Path, spec: Spec, content: CommitContent) -> Iterator[Finding]:
    """Damage inside a shard, named by row; silent about what cannot be opened, which its file's finding names."""
    shard = content.shard
    try:
        samples = pq.read_table(root / samples_file(shard), partitioning=None)
        planned = read_plan(root, shard, ["row", "id", "uri", "conversations"])
    except (OSError, pa.ArrowInvalid, CacheError) as error:
        yield Finding(shard=shard, file=samples_file(shard), problem=f"cannot be read: {error}")
        return
    if samples.schema != SAMPLES_SCHEMA:
        yield Finding(shard=shard, file=samples_file(shard), problem="has other columns than the format's")
        return
    yield from table_findings(content, samples, planned)
    yield from value_findings(root, spec, content, samples)


def table_findings(content: CommitContent, samples: pa.Table, planned: pa.Table) -> Iterator[Finding]:
    shard, name = content.shard, samples_file(content.shard)
    if not samples.select(planned.column_names).equals(planned):
        yield Finding(shard=shard, file=name, problem="rows, ids or texts are not the plan's")
    digest = rows_digest(*(samples[column].to_pylist() for column in ("row", "id", "content_sha256")))
    if digest != content.rows_digest:
        yield Finding(shard=shard, file=name, problem="ids or contents do not match the commit record")
    counts = {each["values"]: each["counts"] for each in pc.value_counts(samples["status"]).to_pylist()}
    expected = {CACHED: content.cached, REJECTED: content.rejected}
    if counts != {status: count for status, count in expected.items() if count}:
        yield Finding(shard=shard, file=name, problem=f"counts {counts}, the commit record {expected}")


def value_findings(root: Path, spec: Spec, content: CommitContent, samples: pa.Table) -> Iterator[Finding]:
    """Each sample's crc32c, decoding and values, and the shard's own structure."""
    file = shard_format(spec).shard_file(content.array, content.shard)
    try:
        data = map_file(root / file)
    except (OSError, ValueError):
        return
    rows = samples["row"].to_pylist()
    locations = read_locations(samples)
    for slot, location in enumerate(locations):
        if problem := location and sample_problem(data, location, spec, content.array):
            yield Finding(shard=content.shard, row=rows[slot], file=file, problem=problem)
    for slot_or_none, problem in shard_format(spec).structure_problems(data, spec.samples_per_shard, locations):
        row = None if slot_or_none is None or slot_or_none >= len(rows) else rows[slot_or_none]
        yield Finding(shard=content.shard, row=row, file=file, problem=problem)


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
