"""Check every byte of a cache, name what is wrong, and find files that are not the cache's.

At level full, a file with its recorded SHA-256 holds what was written; samples are checked, to name rows, only in files
with another one. Level deep checks every sample and the statistics anyway, to find data that was written wrong or
signed again. Threads read in parallel: hashing, which is nearly all of the work, releases the GIL.
"""

import re
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from functools import partial

from cache_store.cache.metadata import read_texts, refuse_no_cache
from cache_store.cache.survey import survey_records
from cache_store.errors import CacheError
from cache_store.format.formats import files_of_shard, shard_format
from cache_store.format.layout import (
    BUILD_FILE,
    PLAN,
    REJECTED_FILE,
    SEAL_FILE,
    SHARDS_FILE,
    SPEC_FILE,
    TEXTS,
    TEXTS_FILE,
    commit_file,
    part_file,
)
from cache_store.format.schema import Seal, Spec
from cache_store.storage.publish import SCRATCH_SUFFIX, scratch_target
from cache_store.storage.store import Address, Store, open_store, with_listing
from cache_store.verify.findings import LEFTOVER, Finding, Report, damage_finding, in_reading_order
from cache_store.verify.metadata import CheckedPlan, check_plan, is_contradicted, metadata_findings, seal_findings
from cache_store.verify.record import file_finding
from cache_store.verify.scope import Level, Slice
from cache_store.verify.shard import CheckedShard, ShardTask, ShardVerifier

STRAY = "does not belong here"

PART = re.compile(rf"{PLAN}/\d{{6,}}\.parquet|{PLAN}/\w+\.json|{TEXTS}/\d{{6,}}-[0-9a-f]{{16}}\.parquet")
"""Matches the name of a part, or of its texts."""


def stray_findings(store: Store, spec: Spec, seal: Seal | None) -> Iterator[Finding]:
    """Yield files in the cache's folders that are not the cache's, including scratch files of dead builds."""
    # The seal may know shards that the spec does not: no advice may name their files.
    known = files_of(store, spec) | (files_of(store, seal.spec) if seal else set())
    for name in store.list():
        if name.startswith(".") and name.endswith(SCRATCH_SUFFIX):
            yield stray(name, known)
    folders = {folder for name in known for folder in folders_above(name)}
    for top in sorted(name for name in folders if "/" not in name):
        yield from strays_below(store, top, known, folders)


def clear_leftovers(store: Store, spec: Spec) -> None:
    """Delete scratch files of dead builds; only the holder of the claim may call it, while it writes nothing.

    On a disk, every folder with files of the cache is listed once: in the Zarr form, one folder per shard.
    """
    known, there = files_of(store, spec), with_listing(store)
    for folder in sorted({name.rpartition("/")[0] for name in known}):
        for name in there.list(folder):
            whole = f"{folder}/{name}".lstrip("/")
            target = f"{folder}/{scratch_target(name) or name}".lstrip("/")
            is_old = PART.fullmatch(target) and whole not in known  # of an extension that did not begin; earlier texts
            if is_old or is_leftover(whole, known):
                store.delete(whole)


def files_of(store: Store, spec: Spec) -> set[str]:
    shards, layout = range(spec.num_shards), shard_format(spec)
    by_shard = (name for shard in shards for name in (*files_of_shard(spec, shard), commit_file(shard)))
    parts = map(part_file, range(len(spec.parts)))
    whole = {BUILD_FILE, REJECTED_FILE, SEAL_FILE, SHARDS_FILE, TEXTS_FILE}
    return {*whole, *layout.metadata(), *parts, *texts_files(store), *by_shard}


def texts_files(store: Store) -> Iterator[str]:
    """Yield the files of the texts in force and of those before; if texts.json is damaged, all in their folder."""
    try:
        yield from read_texts(store).files
    except CacheError:
        with suppress(NotADirectoryError):
            yield from (f"{TEXTS}/{name}" for name in store.list(TEXTS) if not name.startswith("."))


def stray(name: str, known: set[str]) -> Finding:
    return Finding(file=name, problem=LEFTOVER if is_leftover(name, known) else STRAY, kind="stray")


def is_leftover(name: str, known: set[str]) -> bool:
    folder, slash, base = name.rpartition("/")
    written = scratch_target(base)
    return written is not None and folder + slash + written in known


def folders_above(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def strays_below(store: Store, folder: str, known: set[str], folders: set[str]) -> Iterator[Finding]:
    """Yield stray files below a folder; names stay strings, since a large cache has hundreds of thousands."""
    try:
        entries = store.list(folder)
    except NotADirectoryError:
        yield Finding(file=folder, problem="is not a folder of the cache", kind="replaced")
        return
    for entry in entries:
        name = f"{folder}/{entry}".rstrip("/")
        if name in folders or (entry.endswith("/") and store.is_remote):  # a bucket has no folders to delete
            yield from strays_below(store, name, known, folders)
        elif entry.endswith("/"):
            yield from [] if name in known else [stray(name, known)]
        elif name not in known:
            yield stray(name, known)


OnShard = Callable[[CheckedShard], object]


def verify(
    path: Address,
    level: Level = "quick",
    *,
    subset: Container[int] | None = None,
    jobs: int = 1,
    progress: OnShard = lambda checked: None,
) -> Report:
    """Check a cache with `jobs` threads, whose number does not change the report; call `progress` for every shard.

    Shards outside the subset are checked at level quick. Raises CacheError only if there is no cache, OSError if a file
    was not read.
    """
    store = open_store(path)
    nothing = Report(cache=str(store), level=level, subset=str(subset) if isinstance(subset, Slice) else None)
    refuse_no_cache(store)
    surveyed = survey_records(store := with_listing(store))
    spec, seal = surveyed.spec.value, surveyed.seal.value
    if spec is None:
        problem = surveyed.spec.problem or FileNotFoundError()
        return replace(nothing, findings=(damage_finding(problem, store, SPEC_FILE),))
    if is_contradicted(surveyed, spec):
        text = "is not the spec that records, seal and plan were made with"
        return replace(nothing, findings=(Finding(file=SPEC_FILE, problem=text),))
    findings = [*metadata_findings(surveyed, spec), *stray_findings(store, spec, seal)]
    chosen = [subset is None or shard in subset for shard in range(spec.num_shards)]
    tasks = [ShardTask(shard=shard, level=level if each else "quick") for shard, each in enumerate(chosen)]
    check_shard = ShardVerifier(surveyed, spec)
    plan, checked = check_all(partial(check_plan, store, spec, seal, tasks), check_shard, tasks, jobs, progress)
    findings += [*plan.findings, *(finding for each in checked for finding in each.findings), *plan.compare(checked)]
    if seal is not None:
        rejected = file_finding(store, seal.rejected_file)
        findings += [rejected] if rejected else []
        if roll := surveyed.roll.value:
            findings += seal_findings(spec, seal, roll, checked, {finding.file for finding in findings})
        elif surveyed.roll.problem and seal.spec == spec:
            findings.append(damage_finding(surveyed.roll.problem, store, SHARDS_FILE))
    covered = [each for each in checked if chosen[each.task.shard]]
    return replace(
        nothing,
        identity=seal.identity if seal else None,
        shards=spec.num_shards,
        covered=len(covered),
        samples=sum(each.content.cached for each in covered if each.content),
        bytes=sum(each.bytes for each in covered),
        findings=tuple(sorted(set(findings), key=in_reading_order)),  # several checks may report one missing file
    )


def check_all(
    check_all_parts: Callable[[], CheckedPlan],
    check: Callable[[ShardTask], CheckedShard],
    tasks: Sequence[ShardTask],
    jobs: int,
    progress: OnShard,
) -> tuple[CheckedPlan, list[CheckedShard]]:
    """Check the plan and every shard in parallel; results are in shard order. An error cancels what has not begun."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            plan, shards = pool.submit(check_all_parts), [pool.submit(check, task) for task in tasks]
            for done in as_completed(shards):
                progress(done.result())
            return plan.result(), [each.result() for each in shards]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
