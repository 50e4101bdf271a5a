"""Records of one cache hold one recipe; how two of them differ."""

import msgspec

from cache_store.format.schema import CommitRecord, Recipe, commit_file
from cache_store.refusal import Difference, differing, refuse
from cache_store.storage.store import Store


def refuse_other_recipe(store: Store, one: CommitRecord, other: CommitRecord) -> None:
    """StaleError where two shards were made with two recipes."""
    if differences := recipe_differences(one.content.recipe, other.content.recipe):
        names = [commit_file(record.content.shard) for record in (one, other)]
        remedy = "move the shards of one of them away, and run the build of the other again"
        refuse(f"{store} holds shards of two recipes", differences, [remedy], *names)


def recipe_differences(before: Recipe, now: Recipe) -> list[Difference]:
    """Field by field."""
    return [] if before == now else differing(msgspec.to_builtins(before), msgspec.to_builtins(now))
