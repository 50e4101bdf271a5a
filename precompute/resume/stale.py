"""What a build refuses: other inputs, another sample list, other images. Nothing here touches the cache."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cache_store.errors import CacheError
from cache_store.format.schema import SEAL_FILE, Spec, commit_file
from cache_store.refusal import ABSENT, Difference, differing, refuse
from precompute.plan import SHOWN, PlanDifference, some
from precompute.resume.expected import Expected
from precompute.resume.image_changes import ImageChange, OtherShard
from precompute.resume.request import Acts

OF_THE_LIST = ("rows", "plan_digest")
"""Fields of the spec that the sample list decides, which is compared by id."""


def refuse_other_spec(root: Path, cached: Spec, asked: Spec, acts: Acts) -> None:
    """StaleError naming every field of recipe, encoder and store that differs."""
    before, now = (msgspec.to_builtins(spec) for spec in (cached, asked))
    differences = [each for each in differing(before, now) if each.field not in OF_THE_LIST]
    if differences:
        refuse(f"{root} was made from other inputs; it is untouched", differences, keep_both(acts))


def keep_both(acts: Acts) -> list[str]:
    return [
        f"to keep both, build another cache: {acts.with_options('--cache', 'NEW')}",
        "to go on with this one, restore what it was made from and run the same command again",
    ]


def refuse_grown_list(root: Path, rows: int, added: list[str], acts: Acts) -> None:
    """StaleError for a list that has only gained samples."""
    refuse(
        f"{root} was planned from fewer samples than the source has now; it is untouched",
        list_differences(rows, rows + len(added), PlanDifference(added=added, removed=[], changed=[])),
        [f"to add them, keeping all that is encoded: {acts.with_options('--extend')}"],
    )


def refuse_other_list(root: Path, rows: int, now: int, difference: PlanDifference, acts: Acts) -> None:
    """StaleError for a list that has lost samples or changed some."""
    refuse(
        f"{root} was planned from another sample list: {difference}; it is untouched",
        list_differences(rows, now, difference),
        keep_both(acts),
    )


def list_differences(rows: int, now: int, difference: PlanDifference) -> list[Difference]:
    table = [Difference("samples", f"{rows:,}", f"{now:,}")]
    for name in difference.added[:SHOWN]:
        table.append(Difference("new sample", "", name))
    for name in difference.removed[:SHOWN]:
        table.append(Difference("gone sample", name, ""))
    for name in difference.changed[:SHOWN]:
        table.append(Difference("image name or text", name, "changed"))
    return table


def refuse_changed_images(root: Path, samples: int, changes: Sequence[ImageChange], acts: Acts) -> None:
    """StaleError naming samples whose image is no longer the one encoded."""
    if changes:
        ids = some([change.id for change in changes])
        refuse(
            f"{root}: {len(changes):,} of {samples:,} images are not the ones encoded: {ids}; the cache is untouched",
            [as_difference(change) for change in changes],
            [
                f"to encode the images as they are now, build another cache: {acts.with_options('--cache', 'NEW')}",
                "to go on with this one, restore the files and run the same command again",
            ],
        )


def refuse_unknown_images(root: Path, shards: Sequence[int]) -> None:
    """CacheError where nothing that can be trusted remembers the images of shards that were built."""
    if shards:
        first = shlex.join(["precompute", "repair", str(root), "--shards", str(list(shards))])
        raise CacheError(
            f"{root}: what the images of {len(shards):,} shards were cannot be told, because their samples tables or "
            f"records are damaged; first run {first}"
        )


def refuse_changed_rejects(root: Path, changes: Sequence[ImageChange], acts: Acts) -> None:
    """StaleError for rejected samples of shards that are to be built again: the shards would not come out the same."""
    if changes:
        ids = some([change.id for change in changes])
        refuse(
            f"{root}: {len(changes):,} rejected images, in shards that are to be built again, have changed: {ids}; "
            "the cache is untouched",
            [as_difference(change) for change in changes],
            [
                f"to build the shards with the images as they are: {acts.with_options('--retry-rejected')}",
                "to have the very same bytes again, restore the files as they were",
            ],
        )


def as_difference(change: ImageChange) -> Difference:
    return Difference(f"image of {change.id}", change.before or ABSENT, change.now)


def refuse_other_shards(root: Path, others: Sequence[OtherShard], expected: Expected, acts: Acts) -> None:
    """StaleError naming shards that were built again and left as they were, and their samples that are others."""
    if others:
        others = sorted(others, key=lambda other: other.shard)
        shards = some([str(other.shard) for other in others])
        refuse(
            f"{root}: {len(others):,} shards built again do not come out as they were, so that nothing of them was "
            f"replaced: {shards}",
            [each for other in others for each in shard_differences(other, expected)],
            [
                f"{culprits(others)}: restore that and run the same command again",
                f"to take them as they come out now, as another cache for training: delete {stands_for(root, others)} "
                f"in {root}, then {acts.with_options()}",
            ],
        )


def shard_differences(other: OtherShard, expected: Expected) -> list[Difference]:
    return [Difference(f"content of shard {other.shard}", min(expected[other.shard]), other.digest), *other.changes]


def culprits(others: Sequence[OtherShard]) -> str:
    """What may be the matter, as far as the samples tables tell."""
    if all(other.changes for other in others):
        return "samples are not the ones encoded"
    return "an image may have changed unseen, or another machine or library made them"


def stands_for(root: Path, others: Sequence[OtherShard]) -> str:
    """The files that say what the shards were."""
    names = [SEAL_FILE, *(commit_file(other.shard) for other in others)]
    return some([name for name in names if (root / name).exists()])
