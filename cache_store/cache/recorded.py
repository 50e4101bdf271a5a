"""What commit records say of the whole cache: each holds the recipe, and recipe and plan are the spec."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cache_store.cache.metadata import read_commit
from cache_store.errors import CacheError
from cache_store.format.plan import PlanFile
from cache_store.format.schema import COMMITS, CommitRecord, Recipe, Spec, commit_file
from cache_store.refusal import Difference, differing, refuse


def recorded_spec(root: Path) -> Spec:
    """The spec of a cache that has lost it; CacheError where no record is sound, or the plan is not."""
    recipe, plan = recorded_recipe(root), PlanFile(root)
    return Spec(**msgspec.structs.asdict(recipe), rows=plan.num_rows, plan_digest=plan.digests()[0])


def recorded_recipe(root: Path) -> Recipe:
    """The recipe of every sound record; StaleError, naming both, where two records have two."""
    records = sound_records(root)
    first = next(records, None)
    if first is None:
        raise CacheError(f"{root} has no sound commit record to say what it was made with")
    for record in records:
        refuse_other_recipe(root, first, record)
    return first.content.recipe


def sound_records(root: Path) -> Iterator[CommitRecord]:
    """Every record that can be read, in order of shards."""
    for path in sorted((root / COMMITS).glob("*.json")):
        with contextlib.suppress(CacheError, OSError, ValueError):
            if record := read_commit(root, int(path.stem)):
                yield record


def refuse_other_recipe(root: Path, one: CommitRecord, other: CommitRecord) -> None:
    """StaleError where two shards were made with two recipes."""
    if differences := recipe_differences(one.content.recipe, other.content.recipe):
        names = [commit_file(record.content.shard) for record in (one, other)]
        remedy = "move the shards of one of them away, and run the build of the other again"
        refuse(f"{root} holds shards of two recipes", differences, [remedy], *names)


def recipe_differences(before: Recipe, now: Recipe) -> list[Difference]:
    """Field by field."""
    return [] if before == now else differing(msgspec.to_builtins(before), msgspec.to_builtins(now))
