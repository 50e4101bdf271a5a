"""Check the files of the whole cache (spec, plan, seal) and decide which is at fault if they differ."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cache_store.cache.commit import make_seal
from cache_store.cache.metadata import metadata_of, open_plan, read_texts
from cache_store.cache.survey import Survey, held_recipe, size_problem
from cache_store.errors import DAMAGE, CacheError, StaleError
from cache_store.format.layout import BUILD_FILE, SEAL_FILE, TEXTS_FILE, commit_file, part_file, samples_file
from cache_store.format.plan import PartDigests, Plan, encoded_texts_digest, is_cut_as, texts_digest
from cache_store.format.roll import Roll
from cache_store.format.schema import FileRecord, PartTexts, Seal, Spec
from cache_store.storage.store import Store
from cache_store.verify.findings import Finding, damage_finding
from cache_store.verify.record import file_finding
from cache_store.verify.shard import CheckedShard, ShardTask

FLOAT_TOLERANCE = 1e-6


def is_contradicted(survey: Survey, spec: Spec) -> bool:
    """Whether the spec is at fault: records have another recipe, or both seal and plan have another spec."""
    try:
        if held_recipe(survey) != spec.recipe:
            return True
    except StaleError:
        return False  # records differ from each other; each is reported by itself
    seal = survey.seal.value
    return seal is not None and seal.spec != spec and not is_planned(survey.store, spec)


def is_planned(store: Store, spec: Spec) -> bool:
    """Whether the plan is the spec's, or unreadable."""
    try:
        plan = open_plan(store)
        return plan.parts == len(spec.parts) and all(
            is_cut_as(spec, number, (part := plan.part(number)).lengths, part.sizes)
            and part.computed_digests().part == spec.parts[number]
            for number in range(plan.parts)
        )
    except CacheError:
        return True


def metadata_findings(survey: Survey, spec: Spec) -> Iterator[Finding]:
    """Check the files that the spec determines, the seal and the build record."""
    for name, expected in metadata_of(spec):
        try:
            if survey.store.read(name) != expected:
                yield Finding(file=name, problem="is not what the spec says it should be")
        except DAMAGE as error:
            yield damage_finding(error, survey.store, name)
    for name, reading in ((SEAL_FILE, survey.seal), (BUILD_FILE, survey.build)):
        if reading.problem or (name == BUILD_FILE and reading.is_absent):
            yield damage_finding(reading.problem or FileNotFoundError(), survey.store, name)
        elif reading.is_absent:
            is_stopped = survey.build.value is not None and survey.build.value.withdrawing
            why = "a withdrawal has not finished" if is_stopped else "the cache is not sealed"
            yield Finding(file=name, problem=f"is missing: {why}", kind="unsealed")
    build, seal = survey.build.value, survey.seal.value
    if build and seal and not build.withdrawing and build.spec_digest not in ("", seal.spec.digest):
        yield Finding(file=BUILD_FILE, problem="is another cache's: it has the digest of another spec")


@dataclass(frozen=True, kw_only=True)
class CheckedPlan:
    """The result of checking the plan and its texts."""

    findings: list[Finding] = field(default_factory=list)
    samples: dict[int, str] = field(default_factory=dict)
    """Digest of the samples of each shard whose rows were read."""
    texts: dict[int, str] = field(default_factory=dict)
    """Digest of the texts that are encoded, of the same shards of a cache of texts."""

    def compare(self, checked: Iterable[CheckedShard]) -> Iterator[Finding]:
        """Yield a finding for each commit record that was made for other rows than the plan's."""
        for each in checked:
            shard, content = each.task.shard, each.content
            if content and self.samples.get(shard, content.samples) != content.samples:
                problem = "was made for other samples than the plan's"
                yield Finding(shard=shard, file=commit_file(shard), problem=problem)
            elif content and self.texts.get(shard, content.texts) != content.texts:
                problem = "was made for other texts than those in force"
                yield Finding(shard=shard, file=commit_file(shard), problem=problem)


def check_plan(store: Store, spec: Spec, seal: Seal | None, tasks: Sequence[ShardTask]) -> CheckedPlan:
    """Check the parts of the plan and their texts: their sizes, and the SHA-256 of parts whose shards are read.

    Rows are read at level deep, and at level full without a seal.
    """
    seal = seal if seal and seal.spec == spec else None
    plan, levels, checked = open_plan(store, spec), [task.level for task in tasks], CheckedPlan()
    try:
        texts = read_texts(store)
        if len(texts.parts) < len(spec.parts):
            raise CacheError(f"has the texts of {len(texts.parts)} parts, {len(spec.parts)} are planned")
    except DAMAGE as error:
        checked.findings.append(damage_finding(error, store, TEXTS_FILE))
        texts = None
    for number, shards in enumerate(spec.part_shards):
        is_read = any(levels[shard] != "quick" for shard in shards)
        files = [seal and seal.plan_files[number], texts and texts.parts[number].file(number)]
        found = [part_finding(store, file, is_read) for file in files if file]
        checked.findings.extend(filter(None, found))
        read = [shard for shard in shards if levels[shard] in (("deep",) if seal else ("full", "deep"))]
        if read and not any(found) and texts:
            name = part_file(number)
            try:
                digests = digests_of_part(plan, spec, number)
                checked.samples.update({shard: digests.shards[shard - shards[0]] for shard in read})
                name = texts.parts[number].file(number).path
                checked.texts.update(encoded_texts(plan, spec, number, texts.parts[number], read))
            except DAMAGE as error:
                checked.findings.append(damage_finding(error, store, name))
    return checked


def part_finding(store: Store, file: FileRecord, is_read: bool) -> Finding | None:
    if problem := size_problem(store, file):
        return damage_finding(problem, store, file.path)
    return file_finding(store, file) if is_read else None


def digests_of_part(plan: Plan, spec: Spec, number: int) -> PartDigests:
    part = plan.part(number)
    digests = part.computed_digests()
    if not is_cut_as(spec, number, part.lengths, part.sizes) or digests.part != spec.parts[number]:
        raise CacheError("is another part than the spec's")
    return digests


def encoded_texts(
    plan: Plan, spec: Spec, number: int, texts: PartTexts, shards: Sequence[int]
) -> Iterator[tuple[int, str]]:
    """Yield the digest of each shard's texts, if they are encoded; CacheError if texts.json tells others."""
    rows, first = plan.part_rows(number, ["id", *plan.text_columns(number)]), spec.part_shards[number][0]
    if texts_digest(rows) != texts.digest:
        raise CacheError("has other texts than texts.json says")
    if (recipe := spec.array.text) is None:
        return
    for shard in shards:
        start = spec.shard_rows(shard).start - spec.shard_rows(first).start
        yield shard, encoded_texts_digest(recipe, rows.slice(start, len(spec.shard_rows(shard))))


def seal_findings(
    spec: Spec, seal: Seal, roll: Roll, checked: Sequence[CheckedShard], damaged: set[str]
) -> Iterator[Finding]:
    """Check that the seal summarises the commit records, and name each record that was not sealed."""
    if seal.spec != spec:
        yield Finding(file=SEAL_FILE, problem="is the seal of another spec")
        return
    others = unsealed_records(roll, checked)
    if len(others) == len(checked) > 1:
        yield Finding(file=SEAL_FILE, problem="matches none of the commit records")
        return
    yield from (finding for finding in others if finding.file not in damaged)
    records = {commit_file(each.task.shard) for each in checked}
    if others or records & damaged:
        return  # the expected seal cannot be computed
    if {samples_file(each.task.shard) for each in checked} & damaged:
        return
    contents = [each.content for each in checked if each.content]
    has_quick = any(each.task.level == "quick" for each in checked)  # statistics need every table's footer
    stated = msgspec.structs.replace(seal.array, bytes=sum(each.files[0].bytes for each in contents))
    array, sums = stated if has_quick else None, [each.sums for each in checked]
    expected = make_seal(spec, contents, sums, seal.plan_files, seal.rejected_file, seal.shards_file, array)
    unsigned = [msgspec.to_builtins(msgspec.structs.replace(each, sha256="")) for each in (expected, seal)]
    if not nearly_equal(*unsigned):
        yield Finding(file=SEAL_FILE, problem="is not the summary of the commit records")


def unsealed_records(roll: Roll, checked: Sequence[CheckedShard]) -> list[Finding]:
    return [
        Finding(
            shard=each.task.shard,
            file=commit_file(each.task.shard),
            problem="is not the record that the cache was sealed with",
        )
        for each in checked
        if each.content and not roll.holds(each.task.shard, each.content)
    ]


def nearly_equal(expected: Any, found: Any) -> bool:
    """Compare two values, floats up to rounding, in which another machine may differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(nearly_equal(expected[name], found[name]) for name in found)
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(expected) == len(found) and all(map(nearly_equal, expected, found))
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(expected, found, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    return bool(expected == found)
