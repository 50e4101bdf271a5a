"""Checking one shard: its record, its files, every sample in it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from cache_store.errors import CacheError
from cache_store.findings import UNCOMMITTED, Finding, Level
from cache_store.formats import Location, shard_format
from cache_store.metadata import read_commit
from cache_store.plan import DIGESTED, PlanFile, plan_digest
from cache_store.publish import file_sha256
from cache_store.reader import map_file
from cache_store.record import record_digest
from cache_store.regular_file import NOT_A_FILE
from cache_store.schema import (
    SEAL_FILE,
    ArraySpec,
    CommitContent,
    CommitRecord,
    FileRecord,
    Seal,
    Spec,
    commit_file,
    samples_file,
)
from cache_store.shard_scan import scan_shard
from cache_store.tables import read_table
from cache_store.verify_samples import other_rows, read_locations, status_findings, table_findings, table_problem

MISSING = "is missing, though the cache is sealed"


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """One shard to check; quick looks at its record and the sizes of its files."""

    array: str
    shard: int
    level: Level


@dataclass(frozen=True, kw_only=True)
class CheckedShard:
    """What the check of one shard gave."""

    task: ShardTask
    content: CommitContent | None
    """None where the shard has no readable record."""
    digest: str | None
    """Of the content."""
    findings: tuple[Finding, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.content.files) if self.content else 0


class ShardVerifier:
    """Checks the shards of a cache, one at a time, in the process that it was made in."""

    def __init__(self, root: Path, spec: Spec, seal: Seal | None) -> None:
        self._root, self._spec, self._seal = root, spec, seal

    def __call__(self, task: ShardTask) -> CheckedShard:
        name = commit_file(task.array, task.shard)
        try:
            record = read_commit(self._root, task.array, task.shard)
            problem = None if record else MISSING if (self._root / SEAL_FILE).exists() else UNCOMMITTED
        except (CacheError, OSError) as error:
            record, problem = None, unreadable(error, self._root / name)
        if record is None:
            assert problem is not None
            findings = [Finding(shard=task.shard, file=name, problem=problem)]
            findings += [] if problem == UNCOMMITTED else self._findings_without_record(task)
            return CheckedShard(task=task, content=None, digest=None, findings=tuple(findings))
        content = record.content
        findings = [*content_findings(self._spec, task.array, task.shard, content)]
        has_names = tuple(file.path for file in content.files) == self._files(task)
        findings += self._file_findings(task, content) if has_names else self._findings_without_record(task)
        return CheckedShard(task=task, content=content, digest=record_digest(content), findings=tuple(findings))

    def _files(self, task: ShardTask) -> tuple[str, str]:
        return shard_format(self._spec).shard_file(task.array, task.shard), samples_file(task.shard)

    def _file_findings(self, task: ShardTask, content: CommitContent) -> Iterator[Finding]:
        data, table = content.files
        wrong_size = file_finding(self._root, data, "quick", task.shard)  # its sha256 comes with the samples' pass
        wrong_table = file_finding(self._root, table, task.level, task.shard)
        yield from filter(None, (wrong_size, wrong_table))
        if task.level == "full":
            samples, found = self._read_samples(task)
            yield from found
            if samples is not None:
                yield from table_findings(task.shard, content, samples)
                yield from self._plan_findings(task.shard, samples, content if wrong_table is None else None)
            sha256 = data.sha256 if wrong_size is None else None
            yield from self._data_findings(task, samples, sha256, is_table_sound=wrong_table is None)

    def _findings_without_record(self, task: ShardTask) -> Iterator[Finding]:
        """No hash is known, but the files can still be absent, or say of themselves and each other that they differ."""
        data, table = self._files(task)
        for name in (data, table):
            if problem := absence(self._root / name):
                yield Finding(shard=task.shard, file=name, problem=problem)
        if task.level == "quick":
            return
        samples, found = self._read_samples(task)
        found += [] if samples is None else self._plan_findings(task.shard, samples, None)
        yield from found
        if samples is not None and not found:
            yield from status_findings(task.shard, samples)
            yield from self._data_findings(task, samples, None, is_table_sound=True)
        elif (self._root / data).is_file():
            problem = f"is of no use, nor is {table}: {data} was not looked at"
            yield Finding(shard=task.shard, file=commit_file(task.array, task.shard), problem=problem)

    def _read_samples(self, task: ShardTask) -> tuple[pa.Table | None, list[Finding]]:
        """The samples table, if it can serve to find the samples, and why not."""
        path = self._root / samples_file(task.shard)
        if not path.is_file():
            return None, []  # which has been found already
        try:
            samples = read_table(path)
            problem = table_problem(samples, len(self._spec.shard_rows(task.shard)))
        except CacheError as error:
            problem = unreadable(error, path)
        if problem:
            return None, [Finding(shard=task.shard, file=samples_file(task.shard), problem=problem)]
        return samples, []

    @cached_property
    def _plan(self) -> PlanFile | None:
        """None where the plan is damaged, which is a finding of its own and no shard's fault."""
        if self._seal and file_finding(self._root, self._seal.plan_file, "full"):
            return None
        try:
            return PlanFile(self._root)
        except CacheError:
            return None

    def _plan_findings(self, shard: int, samples: pa.Table, vouching: CommitContent | None) -> Iterator[Finding]:
        """Whether the samples are the planned ones; `vouching` is a record whose hash the table has."""
        if self._plan is None:
            return
        try:
            planned = self._plan.shard(shard, list(DIGESTED))
        except CacheError:
            return
        findings = [*other_rows(shard, self._spec.shard_rows(shard), samples, planned)]
        if findings and vouching is not None and plan_digest([planned]) != vouching.plan_digest:
            return  # plan and record differ, which is found elsewhere
        yield from findings

    def _data_findings(
        self, task: ShardTask, samples: pa.Table | None, sha256: str | None, is_table_sound: bool
    ) -> Iterator[Finding]:
        """The shard file: its hash where it is known, each sample, the file's own structure.

        Where it has its hash, and the samples table has not, what differs is the table's fault.
        """
        shard, (name, table) = task.shard, self._files(task)
        path = self._root / name
        if not path.is_file():
            return  # which has been found already
        locations = [] if samples is None else read_locations(samples)
        try:
            scan = scan_shard(path, self._spec.arrays[task.array], locations)
        except OSError as error:
            yield Finding(shard=shard, file=name, problem=unreadable(error, path))
            return
        if sha256 is not None and scan.sha256 != sha256:
            yield Finding(shard=shard, file=name, problem=other_sha256(scan.sha256, sha256))
        is_tables_fault = scan.sha256 == sha256 and not is_table_sound
        file, differs = (table, f"differs from {name}, which is sound: ") if is_tables_fault else (name, "")
        rows = self._spec.shard_rows(shard)
        for slot, problem in (*scan.problems, *self._structure_problems(task, path, samples, locations)):
            row = None if slot is None or slot >= len(rows) else rows[slot]
            yield Finding(shard=shard, row=row, file=file, problem=differs + problem)

    def _structure_problems(
        self, task: ShardTask, path: Path, samples: pa.Table | None, locations: list[Location | None]
    ) -> Iterator[tuple[int | None, str]]:
        """What a mapping of the shard file shows; an empty file cannot be mapped, and is found by its size."""
        if samples is not None and path.stat().st_size:
            layout = shard_format(self._spec)
            yield from layout.structure_problems(map_file(path), self._spec, task.array, task.shard, samples, locations)


def kept_record(root: Path, spec: Spec, array: str, shard: int) -> tuple[CommitRecord | None, str | None]:
    """A committed shard's record, and why the shard cannot be kept: spec must fit, its files must have their sizes.

    For whoever goes on with a cache; neither of the two where the shard is not committed.
    """
    try:
        record = read_commit(root, array, shard)
        if record is None:
            return None, None
        findings = [*content_findings(spec, array, shard, record.content)]
        findings += [found for file in record.content.files if (found := file_finding(root, file, "quick", shard))]
    except CacheError as error:
        return None, str(error)
    return record, str(findings[0]) if findings else None


def unreadable(error: CacheError | OSError, path: Path) -> str:
    """What a finding says that names the file itself."""
    return f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error).removeprefix(f"{path} ")


def content_findings(spec: Spec, array: str, shard: int, content: CommitContent) -> Iterator[Finding]:
    """Whether a record says what a record of this shard must say."""
    name = commit_file(array, shard)
    expected_files = (shard_format(spec).shard_file(array, shard), samples_file(shard))
    claims = {
        "array": (content.array, array),
        "shard": (content.shard, shard),
        "recipe digest": (content.recipe_digest, spec.recipe_digest),
        "files": (tuple(file.path for file in content.files), expected_files),
        "planned samples": (content.cached + content.rejected, len(spec.shard_rows(shard))),
        "reasons": (sum(content.reasons.values()), content.rejected),
        "statistics": (statistics_shape(content), expected_shape(spec.arrays[array], content.cached)),
    }
    for claim, (found, expected) in claims.items():
        if found != expected:
            yield Finding(shard=shard, file=name, problem=f"{claim}: expected {expected}, found {found}")


def statistics_shape(content: CommitContent) -> list[int]:
    """Lengths of everything that the seal adds up."""
    lengths: list[int] = []
    if content.statistics is not None:
        each = content.statistics
        lengths += [each.count, *map(len, (each.sum, each.sum_of_squares, each.minimum, each.maximum))]
    if content.preview is not None:
        lengths += [*map(len, content.preview.gram), *map(len, content.preview.moment)]
    return lengths


def expected_shape(array: ArraySpec, cached: int) -> list[int]:
    channels, height, width = array.shape
    inputs = channels + 1
    return [cached * height * width, *[channels] * 4, *[inputs] * inputs, *[3] * inputs] if cached else []


def file_finding(root: Path, file: FileRecord, level: Level, shard: int | None = None) -> Finding | None:
    """What is wrong with a file that a record names; full compares its SHA-256."""
    path = root / file.path
    try:
        if lack := absence(path):
            problem = lack
        elif (size := path.stat().st_size) != file.bytes:
            problem = f"is {size} bytes, expected {file.bytes}"
        elif level == "full" and (found := file_sha256(path)) != file.sha256:
            problem = other_sha256(found, file.sha256)
        else:
            return None
    except OSError as error:
        problem = unreadable(error, path)
    return Finding(shard=shard, file=file.path, problem=problem)


def absence(path: Path) -> str | None:
    """What is wrong where no file lies."""
    return None if path.is_file() else NOT_A_FILE if os.path.lexists(path) else "is missing"


def other_sha256(found: str, expected: str) -> str:
    return f"sha256 is {found[:12]}…, expected {expected[:12]}…"
