"""What a build refuses, such as another recipe, list, image or shard content, and what it warns of and notes."""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from cache_store.cache.metadata import read_samples, write_build
from cache_store.cache.survey import Survey
from cache_store.errors import CacheError, EncodeOnceError, NoCacheError
from cache_store.format.layout import COMMITS, PLAN, SEAL_FILE, SPEC_FILE, commit_file
from cache_store.format.schema import Recipe, Spec
from cache_store.format.tables import WITHDRAWN, reason_kind
from cache_store.log import log_warning
from cache_store.messages import ABSENT, Difference, abridge, align_rows, counted, printable, recipe_differences, refuse
from cache_store.storage.store import Store
from cache_store.verify.findings import Finding
from precompute.build.decide import Work
from precompute.build.inputs import BuildInputs
from precompute.build.request import BuildRequest
from precompute.build.source import GONE, NEW, RENAMED, SomeIds, SourceNow
from precompute.build.stated import Stated
from precompute.encode.job import MismatchedShard

LARGE_SHARD_BYTES = 2**32
"""A shard of 4,096 float16 latents of 1024 x 1024 images takes half as much."""

LATENT_REASON = "latent "
"""Reasons with this prefix come from the encoder or the store; a retry would give the same result."""


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
    if changes:
        ids = abridge([change.field for change in changes])
        named = [change._replace(field=f"image of {change.field}") for change in changes]
        again = "to continue with this one, restore the files and run the same command again"
        refuse(f"{store}: {what}: {ids}; the cache is untouched", named, [remedy, again])


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
    digests: Mapping[int, str],
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
        differences += [Difference(f"content of shard {shard}", digests[shard], each.digest), *changes[shard]]
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


def refuse_rejected(problem: str, store: Store, spec: Spec, retry: str, *more: str) -> NoReturn:
    kinds = rejected_kinds(store, spec)
    rows = [(kind, f"{count:,}", printable(example)) for kind, (count, example) in sorted(kinds.items())]
    table = align_rows([("reason", "samples", "one of them"), *rows])
    raise EncodeOnceError("\n  ".join([problem, *table, *reject_advice(kinds, retry), *more])) from None


def rejected_kinds(store: Store, spec: Spec) -> dict[str, tuple[int, str]]:
    """Count how many samples of committed shards are rejected for each kind of reason, and the first of them."""
    kinds: dict[str, tuple[int, str]] = {}
    for shard in range(spec.num_shards):
        try:
            samples = read_samples(store, shard, ["id", "reason"])
        except CacheError:
            continue  # not built yet
        for name, reason in zip(samples["id"].to_pylist(), samples["reason"].to_pylist(), strict=True):
            if reason not in (None, WITHDRAWN):
                count, example = kinds.get(reason_kind(reason), (0, f"{name}: {reason}"))
                kinds[reason_kind(reason)] = (count + 1, example)
    return kinds


def reject_advice(kinds: Iterable[str], retry: str) -> Iterator[str]:
    if any(not kind.startswith(LATENT_REASON) for kind in kinds):
        yield f"fix the images, or their paths in the source, then run: {retry}"
    if any(kind.startswith(LATENT_REASON) for kind in kinds):
        yield (
            "latents do not fit the dtype: set encoder.compute_dtype and store.dtype to float32, in a new cache; if "
            "both are float32 already, check the model's weights"
        )


def refuse_to_mend(inputs: BuildInputs, stated: Stated, damage: Sequence[str]) -> None:
    """Raise CacheError for damage, unless this is a repair; before, write the record that a repair needs."""
    if damage and stated.spec and not inputs.request.mends and stated.survey.build.value is None:
        write_build(inputs.store, inputs.config.recorded(), spec_digest=stated.spec.digest)
    refuse_damage(inputs.store, damage, inputs.request)


def refuse_other_samples(stated: Stated, now: SourceNow, request: BuildRequest) -> int:
    """Raise StaleError if the source lacks samples of the cache, or has more; return how many are left out."""
    survey, spec = stated.survey, stated.spec
    if not survey.has_cache or now.listing is None:
        return 0
    if spec is None or now.missing:
        now.count_new()
        refuse_lost_list(survey, now.listing.rows)
    if now.other_texts:
        name = shlex.quote(str(survey.store))
        raise CacheError(
            f"{survey.store}: the texts of {counted(len(now.other_texts), 'part')} are lost, and the source has others "
            f"now; restore its files, or take these: precompute captions {name}"
        )
    if request.new_samples == "append" and not now.difference:
        return 0
    is_other, num_new = bool(now.difference), now.count_new()
    if is_other or (num_new and request.new_samples == "refuse"):
        refuse_other_list(survey.store, spec.rows, now.listing.rows, now.difference, request)
    return num_new


def growth_notes(stated: Stated, now: SourceNow, work: Work, num_left_out: int) -> Iterator[str]:
    if num_left_out:
        yield f"new in the source: {counted(num_left_out, 'sample')}; `precompute build … --extend` adds them"
    if work.is_extension:
        kept = f"; {counted(len(work.kept), 'shard')} kept" if work.kept else ""
        yield f"extending from {work.rows_before:,} to {counted(work.spec.rows, 'sample')}{kept}"
    elif now.num_other_texts:
        name = shlex.quote(str(stated.survey.store))
        yield f"the source has other texts now, which `precompute captions {name}` reads; those of before stay"


def warn_of_sizes(store: Store, work: Work) -> None:
    """Log a warning if a stopped build would lose a shard that takes long, or if a new cache may not fit."""
    spec, free = work.spec, store.free_bytes()
    bytes_of = {array.size.name: array.sample_bytes for array in spec.sized_arrays}
    largest = max(run.rows * bytes_of[run.array] for run in spec.shards)
    if largest > LARGE_SHARD_BYTES:
        log_warning(
            f"a shard takes {largest / 1e9:,.1f} GB, and a stopped build loses the one in hand; a smaller "
            "store.samples_per_shard, such as 64 for clips, loses less"
        )
    if free is not None and spec.sample_bytes > free and spec.array.codec == "none" and not work.kept:
        log_warning(f"{store}: its latents take up to {spec.sample_bytes:,} bytes, and {free:,} are free there")


def refuse_unplanned(store: Store, request: BuildRequest) -> None:
    if not store.has(SPEC_FILE):
        raise NoCacheError(f"{store} has no plan; first run: {request.with_options()}")
