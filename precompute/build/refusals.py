"""The errors by which a build refuses a different recipe, sample list, image or shard content, or too little space."""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NoReturn

from cache_store.cache.metadata import read_samples
from cache_store.cache.survey import Survey
from cache_store.errors import CacheError
from cache_store.format.layout import COMMITS, PLAN, SEAL_FILE, SPEC_FILE, commit_file
from cache_store.format.schema import Recipe
from cache_store.messages import ABSENT, Difference, abridge, counted, recipe_differences, refuse
from cache_store.storage.store import Store
from cache_store.verify.findings import Finding
from precompute.build.request import BuildRequest
from precompute.build.source import GONE, NEW, RENAMED, SomeIds
from precompute.encode.job import MismatchedShard


def abridge_shards(shards: Collection[int]) -> str:
    return abridge(list(map(str, sorted(shards))))


def refuse_other_inputs(store: Store, held: Recipe, asked: Recipe, request: BuildRequest) -> None:
    if differences := recipe_differences(held, asked):
        refuse(f"{store} was made from other inputs; it is untouched", differences, remedies_to_keep_both(request))


def refuse_lost_recipe(survey: Survey) -> NoReturn:
    name = shlex.quote(str(survey.store))
    refuse(
        f"{survey.store}: its recipe is lost; the cache is untouched",
        [Difference(file, "lost or damaged", "needed") for file in (SPEC_FILE, SEAL_FILE, f"{COMMITS}/")],
        [f"restore one of them, or move the files in {name} away, then run the same command again"],
    )


def remedies_to_keep_both(request: BuildRequest) -> list[str]:
    return [
        f"to keep both, build another cache: {request.with_options('--cache', 'NEW')}",
        "to continue with this one, restore its original inputs and run the same command again",
    ]


def refuse_other_list(
    store: Store, rows: int, rows_now: int, difference: Mapping[str, SomeIds], request: BuildRequest
) -> NoReturn:
    found = [f"{ids.total:,} {what} ({ids})" for what, ids in difference.items()]
    summary, remedies = f"from another sample list: {'; '.join(found)}", remedies_to_keep_both(request)
    if {*difference} == {NEW}:
        summary = "from fewer samples than the source has now"
        remedies = [f"to add them and keep everything encoded so far: {request.with_options('--extend')}"]
    if GONE in difference:
        withdraw = f"cache-store withdraw {shlex.quote(str(store))} --ids FILE"
        remedies += [f"to take gone samples out of this one: {withdraw}, then run the same command again"]
    differences = [Difference("samples", f"{rows:,}", f"{rows_now:,}")]
    for what, ids in difference.items():
        named = f"sample {what}" if what == RENAMED else f"{what} sample"
        differences += [Difference(named, *(("", name) if what == NEW else (name, ""))) for name in ids.first]
    refuse(f"{store} was planned {summary}; it is untouched", differences, remedies)


def refuse_lost_list(survey: Survey, num_listed: int) -> NoReturn:
    """Raise StaleError if a part of the plan is lost or damaged, and the source's samples are not the planned ones."""
    rows = next((f"{spec.rows:,}" for spec in survey.specs), "lost, too")
    where = survey.store.where(PLAN)
    refuse(
        f"{where} is lost or damaged, and the source does not list the planned samples in their order; the "
        "cache is untouched",
        [Difference("samples", rows, f"{num_listed:,} others")],
        [f"restore {where} from a copy, or the source as it was when the cache was planned, and run the same command"],
        now="of the source",
    )


def refuse_changed_images(store: Store, what: str, changes: Sequence[Difference], remedy: str) -> None:
    """Raise StaleError for images that are no longer those of the build; fields of `changes` are sample ids."""
    if changes:
        ids = abridge([change.field for change in changes])
        named = [change._replace(field=f"image of {change.field}") for change in changes]
        again = "to continue with this one, restore the files and run the same command again"
        refuse(f"{store}: {what}: {ids}; the cache is untouched", named, [remedy, again])


def refuse_unknown_images(store: Store, shards: Sequence[int]) -> None:
    if shards:
        first = shlex.join(["precompute", "repair", str(store), "--shards", str(list(shards))])
        raise CacheError(
            f"{store}: the images of {counted(len(shards), 'shard')} cannot be checked, because their samples tables "
            f"or records are damaged; first run {first}"
        )


def sample_changes(store: Store, mismatched: MismatchedShard) -> Iterator[Difference]:
    """Yield how samples differ from the table on disk; only for messages, because the table may be damaged."""
    try:
        before = read_samples(store, mismatched.shard, mismatched.samples.column_names)
    except CacheError:
        return
    has_columns = {*before.column_names} == {*mismatched.samples.column_names}
    if not has_columns or not before["id"].equals(mismatched.samples["id"]):
        return
    for was, now in zip(before.to_pylist(), mismatched.samples.to_pylist(), strict=True):
        if was["content_sha256"] != now["content_sha256"]:
            yield Difference(f"content of {was['id']}", *(each["content_sha256"] or ABSENT for each in (was, now)))
        elif was["status"] != now["status"]:
            yield Difference(f"sample {was['id']}", *(each["reason"] or each["status"] for each in (was, now)))


def refuse_mismatched_shards(
    store: Store,
    mismatched: Mapping[int, MismatchedShard],
    allowed: Mapping[int, Collection[str]],
    request: BuildRequest,
) -> None:
    """Raise StaleError naming rebuilt shards that differ, whose old files stay, and their changed samples."""
    if not mismatched:
        return
    differences, changes = (
        list[Difference](),
        {shard: [*sample_changes(store, each)] for shard, each in mismatched.items()},
    )
    for shard, each in sorted(mismatched.items()):
        differences += [Difference(f"content of shard {shard}", min(allowed[shard]), each.digest), *changes[shard]]
    culprits = "an image may have changed unnoticed, or the machine or a library is a different one"
    if all(changes.values()):
        culprits = "samples changed since they were encoded"
    names = [SEAL_FILE, *map(commit_file, sorted(mismatched))]
    vouching = abridge([name for name in names if store.has(name)])
    refuse(
        f"{store}: {counted(len(mismatched), 'shard')} came out differently when rebuilt, so nothing was replaced: "
        f"{abridge_shards(mismatched)}",
        differences,
        [
            f"{culprits}: restore that and run the same command again",
            f"to accept the new content (the cache gets a new identity): delete {vouching} in {store}, then run "
            f"{request.with_options()}",
        ],
    )


def refuse_unfinished_plan(store: Store, damage: Finding | Exception | None, request: BuildRequest) -> NoReturn:
    why = f" ({damage})" if damage else ""
    raise CacheError(f"{store}: planning has not finished{why}; first run: {request.with_options()}")


def refuse_damage(store: Store, damage: Sequence[str], request: BuildRequest) -> None:
    """Raise CacheError naming the first damage and the command that mends all, unless this is a repair."""
    if damage and not request.mends:
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        command = shlex.join(["precompute", "repair", str(store)])
        raise CacheError(f"{store} is damaged: {damage[0]}{more}; nothing was changed; run: {command}")


def refuse_missing_shards(store: Store, shards: Collection[int], num_shards: int) -> None:
    if shards:
        raise CacheError(
            f"{store} is not sealed: {len(shards):,} of {num_shards:,} shards not committed: {abridge_shards(shards)}"
            "; run their ranks again, then seal"
        )
