"""Check one shard: its record, its files, and every sample in it.

Samples are read, not mapped: a failing disk then raises an OSError that names the file, instead of a bus error.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader

import numpy as np
import pyarrow as pa

from cache_store.cache.metadata import open_plan, read_samples, read_sums, read_texts
from cache_store.cache.survey import Survey
from cache_store.errors import DAMAGE, CacheError
from cache_store.format.array import ArraySpec
from cache_store.format.codec import BLOSC_HEADER, crc32c, decode_sample
from cache_store.format.formats import files_of_shard, shard_format
from cache_store.format.layout import TEXTS_FILE, commit_file, part_file, samples_file
from cache_store.format.plan import Plan
from cache_store.format.quantized import Scale, dequantize
from cache_store.format.schema import CommitContent, CommitRecord, FileRecord, Spec, Texts
from cache_store.format.shards import Location, ShardSamples
from cache_store.format.sums import RunningSums, ShardSums
from cache_store.verify.findings import Finding, damage_finding
from cache_store.verify.record import (
    content_findings,
    file_finding,
    mismatched_rows,
    sums_findings,
    table_findings,
    table_problem,
    withdrawn_findings,
)
from cache_store.verify.scope import Level

EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}
"""Exponent bits by dtype: a value is not finite if all of them are set (IEEE 754)."""


def scan_shard(
    stream: BufferedReader,
    array: ArraySpec,
    locations: Sequence[Location | None],
    scale: Scale | None = None,
    sums: RunningSums | None = None,
) -> list[tuple[int, str]]:
    """Check every sample of a shard file: list (slot, problem). OSError if the file is unreadable.

    Quantized samples need their `scale`, [rows, C]. The values of sound samples are added to `sums`.
    """
    size, problems = stream.seek(0, os.SEEK_END), dict[int, str]()
    longest = array.sample_bytes + (0 if array.codec == "none" else BLOSC_HEADER.size)  # incompressible data is kept
    buffer, decoded = memoryview(bytearray(longest)), np.empty(array.sample_bytes, np.uint8)
    for (offset, length, checksum), slot in sorted((each, slot) for slot, each in enumerate(locations) if each):
        if not 0 <= offset < offset + length <= size:
            problems[slot] = f"is at bytes [{offset}, {offset + length}), but the file has {size}"
            continue
        if length > longest:
            problems[slot] = f"is {length} bytes long, but a sample has at most {longest}"
            continue
        stream.seek(offset)
        payload = buffer[: stream.readinto(buffer[:length])]
        if (found := crc32c(payload)) != checksum:
            problems[slot] = f"crc32c is {found:08x}, expected {checksum:08x}"
            continue
        try:
            decode_sample(payload, array.codec, decoded)
            values = finite_values(decoded, array, scale and Scale(*(column[slot : slot + 1] for column in scale)))
        except ValueError as error:
            problems[slot] = str(error)
            continue
        if sums is not None:
            sums.add(values)
    return sorted(problems.items())


def finite_values(decoded: np.ndarray, array: ArraySpec, scale: Scale | None) -> np.ndarray:
    """Return the values of one decoded sample, [1, *shape]; ValueError if one is not finite."""
    values = decoded.view(array.numpy_dtype).reshape(1, *array.shape)
    values = values if scale is None else dequantize(values, scale)
    size, exponent = values.dtype.itemsize, EXPONENTS[values.dtype.name]
    signed, unsigned = values.view(f"<i{size}"), values.view(f"<u{size}")
    # As integers, non-finite values exceed all finite values of their sign, so two maxima show that there are none.
    if signed.max() >= exponent or unsigned.max() >= exponent + (1 << (8 * size - 1)):
        raise ValueError(f"holds {np.count_nonzero((unsigned & exponent) == exponent)} non-finite values")
    return values


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """One shard to check."""

    shard: int
    level: Level


@dataclass(frozen=True, kw_only=True)
class CheckedShard:
    """The result of checking one shard."""

    task: ShardTask
    content: CommitContent | None
    """None if no record can be read."""
    findings: tuple[Finding, ...]
    sums: ShardSums | None = None
    """As the samples table states them; None at level quick, if no row is cached, and if a finding names the table."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.content.files) if self.content else 0


class ShardVerifier:
    """Checks the shards of a cache, in any thread."""

    def __init__(self, survey: Survey, spec: Spec) -> None:
        self._survey, self._store, self._roll, self._spec = survey, survey.store, survey.roll.value, spec

    def __call__(self, task: ShardTask) -> CheckedShard:
        record = self._read_record(task)
        if isinstance(record, Finding):
            missing = () if record.kind == "uncommitted" else self._missing(task)
            return CheckedShard(task=task, content=None, findings=(record, *missing))
        content = record.content
        findings = [*content_findings(self._spec, task.shard, content)]
        if tuple(file.path for file in content.files) != self._files(task):
            return CheckedShard(task=task, content=content, findings=(*findings, *self._missing(task)))
        found, sums = self._check_files(task, content)
        return CheckedShard(task=task, content=content, findings=(*findings, *found), sums=sums)

    def _read_record(self, task: ShardTask) -> CommitRecord | Finding:
        shard, name = task.shard, commit_file(task.shard)
        if on_disk := self._survey.shards.get(shard):
            record, problem = on_disk.record.value, on_disk.record.problem
            return record or damage_finding(problem or FileNotFoundError(), self._store, name, shard)
        if not self._survey.seal.is_absent:
            return Finding(shard=shard, file=name, problem="is missing, though the cache is sealed")
        return Finding(shard=shard, file=name, problem="is missing: the shard is not committed", kind="uncommitted")

    def _files(self, task: ShardTask) -> tuple[str, ...]:
        return files_of_shard(self._spec, task.shard)

    def _check_files(self, task: ShardTask, content: CommitContent) -> tuple[list[Finding], ShardSums | None]:
        """Check the shard's files; samples too at level deep, and at level full if a file is not as sealed."""
        wrong = [self._file_finding(task, file) for file in content.files]
        findings, summed = [*filter(None, wrong)], None
        is_sound = not findings and (self._roll is None or self._roll.holds(task.shard, content))
        if task.level == "deep" or (task.level == "full" and not is_sound):
            found, summed = self._check_samples(task, content, *wrong[:2])
            findings += found
        name = samples_file(task.shard)
        if task.level == "quick" or any(each.file == name for each in findings):
            return findings, None
        try:
            stated = read_sums(self._store, self._spec, content)
        except CacheError as error:
            return [*findings, damage_finding(error, self._store, name, task.shard)], None
        if summed and stated:
            has_preview = self._spec.array.has_preview and not content.withdrawn
            findings += sums_findings(task.shard, stated, summed, has_preview=has_preview)
        return findings, stated

    def _file_finding(self, task: ShardTask, file: FileRecord) -> Finding | None:
        """Check a file's size, which the survey has read, and at levels above quick its SHA-256."""
        if problem := self._survey.shards[task.shard].file_problems.get(file.path):
            return damage_finding(problem, self._store, file.path, task.shard)
        return None if task.level == "quick" else file_finding(self._store, file, task.shard)

    def _check_samples(
        self, task: ShardTask, content: CommitContent, wrong_data: Finding | None, wrong_table: Finding | None
    ) -> tuple[list[Finding], ShardSums | None]:
        """Check the samples; sum sound ones at level deep. Names the table if the shard file is the sound one."""
        samples = self._read_samples(task.shard, content)
        if isinstance(samples, Finding):
            return [samples], None
        findings = [*table_findings(samples, content), *mismatched_rows(samples)]
        findings += self._withdrawn_findings(task, samples)
        is_tables_fault = wrong_table is not None and wrong_data is None
        sums = RunningSums(samples.array) if task.level == "deep" else None
        differing = [*self._data_findings(task, samples, is_tables_fault, sums)]
        findings += [each for each in differing if each.row is not None or not wrong_data]  # reported already
        return findings, sums.sums() if sums and not differing else None

    def _missing(self, task: ShardTask) -> Iterator[Finding]:
        """Name the files that a shard without a usable record lacks; a repair builds the shard again anyway."""
        for name in self._files(task):
            try:
                self._store.size(name)
            except DAMAGE as error:
                yield damage_finding(error, self._store, name, task.shard)

    def _read_samples(self, shard: int, content: CommitContent) -> ShardSamples | Finding:
        """Return the samples table, or a finding if it cannot locate the samples."""
        name = samples_file(shard)
        try:
            table, planned = read_samples(self._store, shard), self._planned_rows(content)
            samples = ShardSamples(self._spec, shard, table, planned)
        except CacheError as error:
            return damage_finding(error, self._store, name, shard)
        problem = table_problem(samples)
        return Finding(shard=shard, file=name, problem=problem) if problem else samples

    def _withdrawn_findings(self, task: ShardTask, samples: ShardSamples) -> Iterator[Finding]:
        part = int(self._spec.part_of_shard[task.shard])
        texts = self._texts.parts[part].file(part).path if self._texts else TEXTS_FILE
        return withdrawn_findings(samples, (part_file(part), texts))

    @cached_property
    def _plan(self) -> Plan:
        return open_plan(self._store, self._spec)

    @cached_property
    def _texts(self) -> Texts | None:
        try:
            return read_texts(self._store)
        except CacheError:
            return None  # the check of the plan reports it

    def _planned_rows(self, content: CommitContent) -> pa.Table | None:
        try:
            return self._plan.recorded_rows(content)
        except CacheError:
            return None  # the plan is damaged, or another than the record's: other checks report it

    def _data_findings(
        self, task: ShardTask, samples: ShardSamples, is_tables_fault: bool, sums: RunningSums | None
    ) -> Iterator[Finding]:
        shard, (name, table, *_), problems = task.shard, self._files(task), list[tuple[int | None, str]]()
        try:
            with self._store.open(name) as stream:
                problems += scan_shard(stream, samples.array, samples.locations, samples.scale, sums)
        except DAMAGE as error:
            yield damage_finding(error, self._store, name, shard)
            return
        file, differs = (table, f"differs from {name}, which is sound: ") if is_tables_fault else (name, "")
        rows = self._spec.shard_rows(shard)
        if data := self._store.map(name):  # an empty file's size is already reported
            problems += shard_format(self._spec).structure_problems(data, samples)
        for slot, problem in problems:
            row = None if slot is None or slot >= len(rows) else rows[slot]
            yield Finding(shard=shard, row=row, file=file, problem=differs + problem)
