"""What a build refuses, in words and tables: another recipe, another sample list, other images, other bytes."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from cache_store.cache.survey import Survey
from cache_store.errors import CacheError
from cache_store.format.names import COMMITS, PLAN_FILE, SEAL_FILE, SPEC_FILE, commit_file
from cache_store.format.schema import Recipe
from cache_store.refusal import ABSENT, Difference, counted, differing, recipe_differences, refuse
from cache_store.storage.store import Store
from cache_store.verify.findings import Report
from precompute.encode.job import MismatchedShard
from precompute.rerun.differences import PlanDifference
from precompute.rerun.ids import SHOWN_IDS, SomeIds, abridged
from precompute.rerun.request import BuildRequest
from precompute.rerun.rows import Rows


def refuse_other_inputs(store: Store, held: Recipe, asked: Recipe, request: BuildRequest) -> None:
    """StaleError naming every field of recipe, encoder and store that differs."""
    if differences := recipe_differences(held, asked):
        refuse(f"{store} was made from other inputs; it is untouched", differences, keep_both(request))


def refuse_other_report(survey: Survey, report: Report | None) -> None:
    """StaleError where both seals were sound and are not the same; what one of them says can be damaged."""
    store, seal = survey.store, survey.seal.value
    if report is None or seal is None or report.identity in (None, seal.identity):
        return
    before = {"folder": report.cache, "cache identity": report.identity}
    differences = differing(before, {"folder": str(store), "cache identity": seal.identity})
    remedy = f"verify the cache as it is now: cache-store verify {shlex.quote(str(store))} --level full --report FILE"
    refuse(f"the report is not one of {store} as it is; it is untouched", differences, [remedy], held="in the report")


def refuse_lost_recipe(survey: Survey) -> NoReturn:
    """StaleError where neither spec nor seal nor any record says what the cache was made with."""
    name = shlex.quote(str(survey.store))
    refuse(
        f"{survey.store}: nothing says with what recipe it was made; it is untouched",
        [Difference(file, "lost or damaged", "needed") for file in (SPEC_FILE, SEAL_FILE, f"{COMMITS}/")],
        [f"restore one of them, or move what lies in {name} away, then run the same command again"],
    )


def keep_both(request: BuildRequest) -> list[str]:
    return [
        f"to keep both, build another cache: {request.with_options('--cache', 'NEW')}",
        "to go on with this one, restore what it was made from and run the same command again",
    ]


def refuse_grown_list(store: Store, rows: int, added: SomeIds, request: BuildRequest) -> NoReturn:
    """StaleError for a list that has only gained samples."""
    refuse(
        f"{store} was planned from fewer samples than the source has now; it is untouched",
        list_differences(rows, rows + added.total, PlanDifference(added=added)),
        [f"to add them, keeping all that is encoded: {request.with_options('--extend')}"],
    )


def refuse_other_list(
    store: Store, rows: int, rows_now: int, difference: PlanDifference, request: BuildRequest
) -> NoReturn:
    """StaleError for a list that has lost samples or changed some."""
    refuse(
        f"{store} was planned from another sample list: {difference}; it is untouched",
        list_differences(rows, rows_now, difference),
        keep_both(request),
    )


def list_differences(rows: int, rows_now: int, difference: PlanDifference) -> list[Difference]:
    return [
        Difference("samples", f"{rows:,}", f"{rows_now:,}"),
        *(Difference("new sample", "", name) for name in difference.added.first),
        *(Difference("gone sample", name, "") for name in difference.removed.first),
        *(Difference("image name or text", name, "changed") for name in difference.changed.first),
    ]


def refuse_lost_list(survey: Survey, source: Rows) -> NoReturn:
    """StaleError where the plan file is lost or damaged, and the source's samples are not those it was made from."""
    there = (name for table in source.shards(["id"]) for name in table["id"].to_pylist())
    gone = sorted({*survey.ids.values()}.difference(there))
    now = dict(enumerate(source.digests.shards))
    changed = (
        Difference(f"samples of shard {shard}", record.content.plan_digest, now.get(shard, ABSENT))
        for shard, record in survey.records.items()
    )
    refuse(
        f"{survey.store.where(PLAN_FILE)} is lost, and the source's samples are not those it was made from; the "
        "cache is untouched",
        [
            *(Difference("gone sample", name, "") for name in gone[:SHOWN_IDS]),
            *(each for each in changed if each.before != each.now),
        ],
        ["restore the source and run the same command again, and the file is restored"],
    )


def refuse_changed_images(store: Store, rows: int, changes: Sequence[Difference], request: BuildRequest) -> None:
    """StaleError naming samples whose image is no longer the one encoded."""
    remedies = [
        f"to encode the images as they are now, build another cache: {request.with_options('--cache', 'NEW')}",
        "to go on with this one, restore the files and run the same command again",
    ]
    refuse_images(store, changes, f"{len(changes):,} of {rows:,} images changed since they were encoded", remedies)


def refuse_changed_rejects(store: Store, changes: Sequence[Difference], request: BuildRequest) -> None:
    """StaleError for rejected samples of shards that are to be built again: the shards would not come out the same."""
    what = f"{counted(len(changes), 'rejected image')} changed, in shards that are to be built again"
    remedies = [
        f"to build the shards with the images as they are: {request.with_options('--retry-rejected')}",
        "to have the very same bytes again, restore the files as they were",
    ]
    refuse_images(store, changes, what, remedies)


def refuse_images(store: Store, changes: Sequence[Difference], what: str, remedies: Sequence[str]) -> None:
    """StaleError for changes, if there are any; their fields are sample ids."""
    if changes:
        ids = abridged([change.field for change in changes])
        rows = [change._replace(field=f"image of {change.field}") for change in changes]
        refuse(f"{store}: {what}: {ids}; the cache is untouched", rows, remedies)


def refuse_unknown_images(store: Store, shards: Sequence[int]) -> None:
    """CacheError where nothing that can be trusted remembers the images of shards that were built."""
    if shards:
        first = shlex.join(["precompute", "repair", str(store), "--shards", str(list(shards))])
        raise CacheError(
            f"{store}: what the images of {counted(len(shards), 'shard')} were cannot be told, because their samples "
            f"tables or records are damaged; first run {first}"
        )


def refuse_mismatched_shards(
    store: Store,
    mismatched: Mapping[int, MismatchedShard],
    allowed: Mapping[int, Collection[str]],
    changes: Mapping[int, Sequence[Difference]],
    request: BuildRequest,
) -> None:
    """StaleError naming shards that were built again and left as they were, and their samples that have changed."""
    if not mismatched:
        return
    differences = []
    for shard, each in sorted(mismatched.items()):
        differences += [Difference(f"content of shard {shard}", min(allowed[shard]), each.digest), *changes[shard]]
    culprits = "an image may have changed unseen, or another machine or library made them"
    if all(changes.values()):
        culprits = "samples are not the ones encoded"
    names = [SEAL_FILE, *map(commit_file, sorted(mismatched))]
    vouching = abridged([name for name in names if store.has(name)])
    refuse(
        f"{store}: {counted(len(mismatched), 'shard')} built again would not come out as before, so that nothing was "
        f"replaced: {abridged(list(map(str, sorted(mismatched))))}",
        differences,
        [
            f"{culprits}: restore that and run the same command again",
            f"to take them as they come out now, as another cache for training: delete {vouching} in {store}, then "
            f"{request.with_options()}",
        ],
    )
