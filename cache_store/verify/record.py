"""Checking a commit record: whether it says what a record of its shard must say, and whether the shard can be kept."""

import math
from collections.abc import Iterator

from cache_store.cache.survey import ShardOnDisk
from cache_store.format.formats import files_of_shard
from cache_store.format.names import commit_file
from cache_store.format.schema import ArraySpec, CommitContent, CommitRecord, FeatureStatistics, Spec
from cache_store.format.statistics import equal_but_for_rounding
from cache_store.refusal import recipe_differences
from cache_store.verify.findings import Finding


def usable_record(spec: Spec, shard: int, on_disk: ShardOnDisk) -> tuple[CommitRecord | None, str | None]:
    """A record that fits the spec, and why the shard cannot be kept, be it for its files' sizes alone."""
    record = on_disk.record.value
    if record is None:
        return None, str(on_disk.record.problem)
    if finding := next(content_findings(spec, shard, record.content), None):
        return None, str(finding)
    return record, on_disk.file_problem


def content_findings(spec: Spec, shard: int, content: CommitContent) -> Iterator[Finding]:
    name = commit_file(shard)
    claims = {
        "shard": (content.shard, shard),
        "files": (tuple(file.path for file in content.files), files_of_shard(spec, shard)),
        "planned samples": (content.cached + content.rejected, len(spec.shard_rows(shard))),
        "reasons": (sum(content.reasons.values()), content.rejected),
        "statistics": (statistics_shape(content), expected_shape(spec.array, content.cached)),
    }
    for field, found_text, expected_text in recipe_differences(content.recipe, spec.recipe):
        problem = f"recipe: {field}: expected {expected_text}, found {found_text}"
        yield Finding(shard=shard, file=name, problem=problem)
    for claim, (found, expected) in claims.items():
        if found != expected:
            yield Finding(shard=shard, file=name, problem=f"{claim}: expected {expected}, found {found}")


def statistics_findings(shard: int, recorded: FeatureStatistics, found: FeatureStatistics | None) -> Iterator[Finding]:
    """Whether the record's sums are those of the shard's samples, each of which has been checked."""
    if found is None or len(found.sum) != len(recorded.sum):
        return  # which is found by the counts, and by the spec
    if not equal_but_for_rounding(found, recorded):
        problem = "statistics do not follow from the shard's samples"
        yield Finding(shard=shard, file=commit_file(shard), problem=problem)


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
    if not cached:
        return []
    features = array.num_features
    lengths = [cached * math.prod(array.shape) // features, *[features] * 4]
    inputs = features + 1
    return [*lengths, *[inputs] * inputs, *[3] * inputs] if array.has_preview else lengths
