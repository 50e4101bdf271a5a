"""`cache-store withdraw`: take samples out of sealed caches on request, without an encoder.

The ids are written into the build record, and the seal is deleted, so that nobody reads the cache meanwhile. Plan,
texts, the shards that had these samples and the seal are written; then the ids leave the build record. Every step is
idempotent: the same command, or a build of the cache, finishes a stopped withdrawal.
"""

import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from cache_store.cache.commit import sum_up, write_seal
from cache_store.cache.metadata import (
    file_record,
    open_plan,
    put_in_force,
    put_part,
    put_texts,
    read_build,
    read_samples,
    read_spec,
    read_texts,
    refuse_no_cache,
    write_build,
)
from cache_store.cache.reader import open_cache
from cache_store.cache.survey import Reading, survey_build, survey_records
from cache_store.copy.copy import damaged
from cache_store.copy.shards import CacheAt, OldShard, OldShardError, copy_samples
from cache_store.errors import CacheError, ConfigError
from cache_store.format.layout import BUILD_FILE, SEAL_FILE, TEXTS_FILE, commit_file, part_file
from cache_store.format.plan import is_withdrawn, without_samples
from cache_store.format.schema import BuildRecord, CommitRecord, FileRecord, Seal, Spec
from cache_store.format.tables import CACHED
from cache_store.log import log_info, log_result
from cache_store.messages import abridge, counted
from cache_store.options import WithdrawConfig
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.local import LocalStore
from cache_store.storage.store import Store, local_path, open_store
from cache_store.verify.record import file_finding
from cache_store.verify.verify import clear_leftovers, verify


def run_withdraw(caches: Sequence[str], config: WithdrawConfig) -> int:
    ids = read_ids(config.ids)
    for done in withdraw([*dict.fromkeys(caches)], ids):
        if done.seal is None:
            print(f"{done.store}: {counted(done.samples, 'sample')} withdrawn already")
            continue
        print(f"{done.store}: withdrawn {counted(done.samples, 'sample')}, rewritten {counted(done.shards, 'shard')}")
        withdrawn = {"cache": str(done.store), "samples": done.samples, "identity": done.seal.identity}
        log_result(f"withdrawn from {done.store}", withdraw=withdrawn)
        size = f"{counted(done.seal.cached, 'sample')}, {done.seal.array.bytes:,} bytes"
        print(f"sealed {done.store}: {size}, cache identity {done.seal.identity}")
        print(f"next: cache-store verify {shlex.quote(str(done.store))} --level full")
    return 0


def read_ids(file: str) -> list[str]:
    """Read ids, one a line, each once; ConfigError if there are none or the file cannot be read."""
    path = local_path("--ids", file)
    try:
        text = LocalStore(path.parent).read(path.name).decode("utf-8-sig")
    except (OSError, CacheError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--ids {path}: {reason}; expected a text file with an id a line") from None
    ids = [*dict.fromkeys(line.removesuffix("\r") for line in text.split("\n") if line.strip())]
    if not ids:
        raise ConfigError(f"--ids {path} holds no id; expected one a line")
    return ids


@dataclass(frozen=True, kw_only=True)
class Withdrawn:
    store: Store
    samples: int
    """Samples of the cache among the ids."""
    shards: int = 0
    """Shards that were rewritten."""
    seal: Seal | None = None
    """The new seal; None if all samples were withdrawn before."""


def withdraw(caches: Sequence[str | Path | Store], ids: Collection[str]) -> Iterator[Withdrawn]:
    """Withdraw samples from each cache in turn; a stopped withdrawal is finished first.

    Before anything else is written, raises ConfigError for an id that a cache does not have, CacheError for one that it
    has twice, for a damaged cache and for one that would have no sample left, StaleError for an unfinished cache.
    """
    stores = [open_store(cache) for cache in caches]
    with ExitStack() as claims:
        for store in stores:
            refuse_no_cache(store)  # a claim would make its folder
            claims.enter_context(store.claim())
            resume_withdrawal(store)
        withdrawals = [Withdrawal(store, ids) for store in stores]
        for each in withdrawals:
            each.refuse_unfit()
        for each in withdrawals:
            yield each.carry_out()


class Withdrawal:
    """The samples to withdraw from one cache, whose claim the caller holds."""

    def __init__(self, store: Store, ids: Collection[str]) -> None:
        """Find the ids in the plan; StaleError if the cache is unfinished."""
        self._store, self._build, self._seal = store, read_build(store), open_cache(store).seal
        self._plan, self._ids = open_plan(store, read_spec(store)), ids
        self._counts = Counter[str]()
        """How often the plan has each id."""
        self._left: dict[int, pa.Table] = {}
        """Per shard: ids, and which are left to withdraw."""
        wanted = pa.array(ids, pa.string())
        for shard in range(self._plan.num_shards):
            rows = self._plan.shard(shard, ["id"])
            if pc.any(mask := pc.is_in(rows["id"], wanted)).as_py():
                self._counts.update(rows["id"].filter(mask).to_pylist())
                is_gone = pa.array(is_withdrawn(self._plan.shard(shard, ["state"])))
                if pc.any(left := pc.and_not(mask, is_gone)).as_py():
                    self._left[shard] = pa.table({"id": rows["id"], "left": left})

    def refuse_unfit(self) -> None:
        """Refuse unknown and repeated ids, a damaged cache, and one that would have no sample left."""
        store = self._store
        if unknown := [name for name in self._ids if name not in self._counts]:
            named = f"{counted(len(unknown), 'id')}: {abridge(unknown)}"
            raise ConfigError(f"the plan of {store} does not have {named}; nothing was changed")
        if repeated := [name for name, count in self._counts.items() if count > 1]:
            named = f"{counted(len(repeated), 'id')} more than once: {abridge(repeated)}"
            raise CacheError(f"the plan of {store} has {named}; nothing was changed")
        if not self._left:
            return
        report = verify(store, "quick")
        replace(report, findings=tuple(each for each in report.findings if each.kind != "stray")).raise_if_damaged()
        records, num_cached = survey_records(store).records, 0
        for shard, rows in self._left.items():
            for file in records[shard].content.files:
                if finding := file_finding(store, file, shard):
                    raise damaged(store, f"{finding}; nothing was changed")
            is_cached = pc.equal(read_samples(store, shard, ["status"])["status"], CACHED)
            num_cached += pc.sum(pc.and_(is_cached, rows["left"])).as_py()
        if num_cached == self._seal.cached:
            raise CacheError(f"{store} would have no sample left; delete the cache instead. Nothing was changed")

    def carry_out(self) -> Withdrawn:
        store, build, samples = self._store, self._build, self._counts.total()
        left = {name for rows in self._left.values() for name in rows["id"].filter(rows["left"]).to_pylist()}
        if not left:
            return Withdrawn(store=store, samples=samples)
        listed = build.listed
        if listed and listed.plan != tuple(file.sha256 for file in self._seal.plan_files):
            listed = None
        build = msgspec.structs.replace(build, listed=listed, withdrawing=tuple(sorted(left)))
        write_build(store, build.config, listed, build.withdrawing, spec_digest=build.spec_digest)
        seal, shards = finish_withdrawal(store, build)
        assert seal is not None, "the cache was sealed, so every shard is committed"
        return Withdrawn(store=store, samples=samples, shards=shards, seal=seal)


def resume_withdrawal(store: Store) -> Reading[BuildRecord]:
    """Read the build record; first finish the withdrawal that it states, if any."""
    build = survey_build(store)
    if build.value is None or not build.value.withdrawing:
        return build
    log_info(f"{store}: a withdrawal of {counted(len(build.value.withdrawing), 'sample')} was stopped; finishing it")
    finish_withdrawal(store, build.value)
    return survey_build(store)


def finish_withdrawal(store: Store, build: BuildRecord) -> tuple[Seal | None, int]:
    """Do what is left of the withdrawal that the build record states; return the seal and the number of rewritten
    shards.

    The seal is None if a shard is not committed: only a build can finish such a cache.
    """
    store.make_durable(BUILD_FILE)  # before anything relies on it: a program that died may have written it
    spec = read_spec(store)
    plan_files = withdraw_from_plan(store, spec, build.withdrawing)
    surveyed, plan = survey_records(store), open_plan(store, spec)
    records = surveyed.records
    withdrawn = [count for part in range(plan.parts) for count in plan.part(part).withdrawn]
    others = [shard for shard, each in records.items() if each.content.withdrawn != withdrawn[shard]]
    if others:
        store.delete(SEAL_FILE)  # durably, also if a program that died has deleted it
    with ProgressBar("withdraw", len(others), "shard") as bar:
        for shard in others:
            records[shard] = rewrite_shard(CacheAt(store, spec), records[shard], plan.shard(shard))
            bar.update(1)
    clear_leftovers(store, spec)
    seal = None
    if len(records) == spec.num_shards:
        contents = [record.content for _, record in sorted(records.items())]
        store.make_durable(commit_file(0))  # and so all other records
        seal = write_seal(store, sum_up(store, spec, contents, plan_files), surveyed.seal.value)
    listed = build.listed and msgspec.structs.replace(build.listed, plan=tuple(file.sha256 for file in plan_files))
    write_build(store, build.config, listed, spec_digest=build.spec_digest)
    return seal, len(others)


def rewrite_shard(cache: CacheAt, record: CommitRecord, planned: pa.Table) -> CommitRecord:
    """Write the shard of `record` again for its rows of the new plan, `planned`; return its new record.

    New files replace old ones in turn, the record last, so that this can be resumed. CacheError if the shard is
    damaged, or if the plan withdraws none of its samples.
    """
    shard = record.content.shard
    try:
        if not is_withdrawn(planned).any():
            raise OldShardError("it was made for other samples than the plan's")
        old = OldShard(cache, record, planned, rewritten=True)
        return copy_samples(cache, shard, planned, [(old, range(len(planned)))], rewritten=True)
    except OldShardError as error:
        raise CacheError(
            f"{cache.store}: shard {shard} cannot be copied without its withdrawn samples: {error}; delete "
            f"{cache.store.where(commit_file(shard))}, then run the `precompute build` of this cache, which encodes "
            "the shard again"
        ) from None


def withdraw_from_plan(store: Store, spec: Spec, ids: Collection[str]) -> list[FileRecord]:
    """Write the parts that have these samples without them, and their texts; return all parts' files."""
    plan, wanted, texts = open_plan(store, spec), pa.array(ids, pa.string()), [*read_texts(store).parts]
    for number, shards in enumerate(spec.part_shards):
        if not any(pc.any(pc.is_in(plan.shard(shard, ["id"])["id"], wanted)).as_py() for shard in shards):
            continue
        tables, is_left = list[pa.Table](), False
        for rows in map(plan.shard, shards):
            mask = pc.is_in(rows["id"], wanted).to_numpy()
            is_left |= bool((mask & ~is_withdrawn(rows)).any())
            tables.append(without_samples(rows, mask))
        if is_left:
            store.delete(SEAL_FILE)
            put_part(store, number, [*zip(tables, plan.part(number).sizes, strict=True)])
        texts[number] = put_texts(store, number, tables)
    put_in_force(store, texts)
    store.make_durable(TEXTS_FILE)
    store.make_durable(part_file(0))  # and all other parts
    return [file_record(store, part_file(part)) for part in range(len(spec.parts))]
