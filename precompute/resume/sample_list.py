"""The source's samples brought into the rows of an existing cache, and what is new among them."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa

from cache_store.cache.metadata import read_seal, read_spec
from cache_store.errors import CacheError, NewerFormatError
from cache_store.format.plan import DIGESTED, plan_digest, read_plan
from cache_store.format.schema import SEAL_FILE, SPEC_FILE, Spec, samples_file
from cache_store.format.tables import read_table
from cache_store.verify.file import file_finding
from cache_store.verify.spec import readable_records
from precompute.config import BuildConfig
from precompute.encode.progress import say
from precompute.plan import compare_plans, in_order_of
from precompute.resume.lost import held_plan, refuse_unplanned, refuse_without_spec
from precompute.resume.request import Acts
from precompute.resume.stale import refuse_grown_list, refuse_other_list

WITNESSES = 100
"""Records asked under what spec they were made: one alone may be another cache's, and there may be a million."""

MakeSpec = Callable[[pa.Table], Spec]
"""From a plan to the spec that the config asks for."""


@dataclass(frozen=True, kw_only=True)
class SampleList:
    """What a cache holds and is to hold."""

    cached: Spec
    """The cache's spec as it stands."""
    plan: pa.Table
    """Every sample that the cache is to hold, in rows: those it was planned with, then the new ones."""
    fingerprints: pa.ChunkedArray | None
    """Of the rows planned before; None where the plan file is lost or is not what spec and seal say."""
    begun: bool
    """The plan file is already that of an extension, though the spec is not."""

    @property
    def grows(self) -> bool:
        return bool(self.plan.num_rows > self.cached.rows)

    @property
    def open_shard(self) -> int | None:
        """The shard, if there is one, that new rows fill up: the last one so far."""
        full, open_rows = divmod(self.cached.rows, self.cached.samples_per_shard)
        return full if self.grows and open_rows else None

    @property
    def to_write(self) -> pa.Table:
        """The plan, with rows planned before as they were."""
        if self.fingerprints is None:
            return self.plan
        now = self.plan["fingerprint"].slice(self.cached.rows)
        kept = pa.chunked_array([*self.fingerprints.chunks, *now.chunks], pa.string()).combine_chunks()
        return self.plan.set_column(self.plan.column_names.index("fingerprint"), "fingerprint", kept)


def arrange(config: BuildConfig, found: pa.Table, make_spec: MakeSpec, acts: Acts) -> SampleList:
    """Bring `found` into the cache's rows; StaleError where samples are gone or changed, or new and not asked for."""
    root = config.root
    cached = read_or_infer_spec(config, found, make_spec)
    planned, begun = planned_before(root, cached)
    plan = in_order_of(found, planned["id"] if planned is not None else remembered_ids(root, cached, found))
    if not as_planned(plan.slice(0, cached.rows), planned, cached):
        if planned is None:
            refuse_unplanned(root, cached, found)
        refuse_other_list(root, cached.rows, found.num_rows, compare_plans(planned, found), acts)
    if plan.num_rows > cached.rows and not same_samples(begun, plan):
        plan = with_new_samples(root, cached, plan, acts)
    fingerprints = sound_fingerprints(root, cached, planned, begun)
    return SampleList(cached=cached, plan=plan, fingerprints=fingerprints, begun=begun is not None)


def as_planned(plan: pa.Table, planned: pa.Table | None, cached: Spec) -> bool:
    """Compared as columns, which takes no time, where the plan file is there; else by digest."""
    if planned is None:
        return plan_digest([plan]) == cached.plan_digest
    return bool(plan.select(DIGESTED).equals(planned.select(DIGESTED)))


def with_new_samples(root: Path, cached: Spec, plan: pa.Table, acts: Acts) -> pa.Table:
    """The plan as far as it is wanted."""
    if acts.new_samples == "append":
        return plan
    if acts.new_samples == "refuse":
        refuse_grown_list(root, cached.rows, plan["id"].slice(cached.rows).to_pylist(), acts)
    say(f"{plan.num_rows - cached.rows:,} samples are new in the source; `precompute build … --extend` adds them")
    return plan.slice(0, cached.rows)


def read_or_infer_spec(config: BuildConfig, found: pa.Table, make_spec: MakeSpec) -> Spec:
    """The cache's spec; where its file is lost or damaged, the one asked for, if the cache vouches for that."""
    root = config.root
    try:
        spec = read_spec(root)
    except NewerFormatError:
        raise
    except CacheError as error:
        asked = asked_spec(root, found, make_spec)
        if vouches_for(root, asked):
            return asked
        path = root / SPEC_FILE
        refuse_without_spec(config, str(error) if path.exists() else f"{path} is missing", asked, found)
    if vouches_for(root, spec):
        return spec
    asked = asked_spec(root, found, make_spec)
    has_begun_to_grow = asked.rows > spec.rows and not (root / SEAL_FILE).exists()
    return asked if vouches_for(root, asked) and not has_begun_to_grow else spec


def asked_spec(root: Path, found: pa.Table, make_spec: MakeSpec) -> Spec:
    return make_spec(in_order_of(found, remembered_ids(root, None, found)))


def vouches_for(root: Path, spec: Spec) -> bool:
    """Whether the seal or, as it may be another cache's, the plan and most witnesses were made under this very spec."""
    with contextlib.suppress(CacheError):
        if read_seal(root).spec_digest == spec.digest:
            return True
    if plan_digest([held_plan(root)]) != spec.plan_digest:
        return False
    witnesses = islice(readable_records(root, spec), WITNESSES)
    fits = [record.content.recipe == spec.recipe for record in witnesses]
    return sum(fits) * 2 > len(fits)


def planned_before(root: Path, cached: Spec) -> tuple[pa.Table | None, pa.Table | None]:
    """The plan of the spec, None where it is lost; and the longer plan of an extension that has only begun."""
    try:
        on_disk = read_plan(root)
    except CacheError:
        return None, None
    planned = on_disk.slice(0, cached.rows)
    if plan_digest([planned]) != cached.plan_digest:
        return None, None
    return planned, on_disk if on_disk.num_rows > cached.rows else None


def same_samples(begun: pa.Table | None, plan: pa.Table) -> bool:
    return begun is not None and bool(begun.select(DIGESTED).equals(plan.select(DIGESTED)))


def sound_fingerprints(
    root: Path, cached: Spec, planned: pa.Table | None, begun: pa.Table | None
) -> pa.ChunkedArray | None:
    """The planned rows' fingerprints, where the file is the sealed one, if any is, or that of a begun extension."""
    if planned is None:
        return None
    damaged: object = None
    try:
        seal = read_seal(root) if begun is None and (root / SEAL_FILE).exists() else None
        damaged = seal and seal.spec_digest == cached.digest and file_finding(root, seal.plan_file, "full")
    except CacheError as error:
        say(f"damage found, the seal is made again from the records: {error}")
    return None if damaged else planned["fingerprint"]


def remembered_ids(root: Path, cached: Spec | None, found: pa.Table) -> pa.ChunkedArray:
    """Ids in the order of rows, as far as the plan file, or else the samples tables, still say it.

    Rows that nothing speaks of go to the samples left over, by id; a digest decides whether that was right.
    """
    if cached is None:
        try:
            return read_plan(root)["id"]
        except CacheError:
            pass
    # Not as many as the spec says: where the source has fewer samples, no order of them is the cache's.
    rows: list[str | None] = [None] * min(cached.rows if cached else found.num_rows, found.num_rows)
    for path in sorted((root / samples_file(0)).parent.glob("*.parquet")):
        for row, name in read_rows(path):
            if 0 <= row < len(rows):
                rows[row] = name
    left = iter(sorted(set(found["id"].to_pylist()) - set(rows)))
    return pa.chunked_array([[name if name is not None else next(left, None) for name in rows]], pa.string())


def read_rows(path: Path) -> list[tuple[int, str]]:
    try:
        table = read_table(path, ["row", "id"])
    except CacheError:
        return []
    return list(zip(table["row"].to_pylist(), table["id"].to_pylist(), strict=True))
