"""`precompute captions`: read the texts of a cache's samples again. Every latent stays; only texts encode anew."""

from dataclasses import dataclass
from heapq import nsmallest

import pyarrow as pa
import pyarrow.compute as pc

from cache_store.cache.metadata import (
    open_plan,
    put_in_force,
    put_texts,
    read_build,
    read_spec,
    refuse_no_cache,
)
from cache_store.cache.survey import survey_records
from cache_store.errors import CacheError, ConfigError, SourceError
from cache_store.format.layout import SEAL_FILE, TEXTS_FILE
from cache_store.format.plan import Plan, encoded_texts_digest, extra_columns, is_withdrawn, without_samples
from cache_store.format.schema import PartTexts, Spec
from cache_store.format.tables import PLAN_SCHEMA, TEXTS_SCHEMA
from cache_store.messages import BUILD_AGAIN, SHOWN_NAMES, abridge, counted
from cache_store.storage.store import Address, Store, open_store
from cache_store.verify.verify import clear_leftovers
from precompute.config import BuildConfig, CaptionsConfig, advising_on_moved_paths
from precompute.inputs import make_reader
from precompute.rerun.match_rows import places_of, read_rows
from precompute.rerun.rows import ListedRows, SomeIds, id_hashes
from precompute.rerun.source_plan import make_plan
from precompute.sources.opening import open_source, recognised


@dataclass(frozen=True, kw_only=True)
class Recaptioned:
    """What changed."""

    changed: SomeIds
    """Samples with other texts or extra columns than before."""
    extra: tuple[str, ...]
    """Names of the extra columns now."""
    kept: int
    """Samples that the source lacks, which keep their texts."""
    shards: int
    """Shards of a cache of texts that a build has to encode again."""


def take_captions(cache: Address, config: CaptionsConfig) -> Recaptioned:
    """Read the texts again and put them in force; CacheError or ConfigError, before a write, if that is impossible."""
    refuse_no_cache(store := open_store(cache))
    with store.claim():
        spec = read_spec(store)
        if spec.store_format == "webdataset":
            raise ConfigError(
                f"{store}: its tars hold the texts; `cache-store copy {store} OUT --format zarr` makes a cache whose "
                "texts can change"
            )
        if read_build(store).withdrawing:
            raise CacheError(f"{store}: a withdrawal was stopped; {BUILD_AGAIN}")
        with advising_on_moved_paths(cache):
            found = list_texts(store, spec, config)
        return Recaption(store, spec, found, keep_missing=config.keep_missing).carry_out()


def list_texts(store: Store, spec: Spec, config: CaptionsConfig) -> ListedRows:
    """List the samples of the source that is named, or of the cache's own."""
    built, image = BuildConfig.of_cache(store), spec.array.image
    chosen = recognised(config.source if config.source.path else built.source)
    source = open_source(chosen, built.media)
    samples = source.samples()
    if image and image.clip and not config.source.path:
        samples = make_reader(source, spec.array, clips=built.clip).samples(samples, open_plan(store, spec))
    return make_plan(samples, spec.samples_per_shard, f"source.path: {chosen.path}")


class Recaption:
    """The texts of a cache's samples as a source has them now; the caller holds the claim."""

    def __init__(self, store: Store, spec: Spec, found: ListedRows, *, keep_missing: bool) -> None:
        self._store, self._spec, self._found, self._keeps = store, spec, found, keep_missing
        self._plan: Plan = open_plan(store, spec)
        ids = (self._plan.shard(shard, ["id"]) for shard in range(spec.num_shards))
        self._places, self._is_there = places_of(id_hashes(found.shards(["id"])), id_hashes(ids))
        self._changed, self._first, self._kept = 0, list[str](), 0

    def carry_out(self) -> Recaptioned:
        store, spec = self._store, self._spec
        self._refuse_missing()
        before, parts, stale = self._plan.texts, list[PartTexts](), 0
        records = survey_records(store).records if spec.array.text else {}
        for number, shards in enumerate(spec.part_shards):
            tables = [*map(self._texts_of, shards)]
            for shard, table in zip(shards, tables, strict=True):
                if spec.array.text and shard in records:
                    stale += encoded_texts_digest(spec.array.text, table) != records[shard].content.texts
            parts.append(put_texts(store, number, tables, before.parts[number]))
        if stale:
            store.delete(SEAL_FILE)  # the samples of a sealed cache are those of its texts
        if tuple(parts) != before.parts:
            put_in_force(store, parts, before.parts)
            store.make_durable(TEXTS_FILE)
        clear_leftovers(store, spec)
        extra = tuple(extra_columns(tables[0].schema))
        changed = SomeIds(self._changed, self._first)
        return Recaptioned(changed=changed, extra=extra, kept=self._kept, shards=stale)

    def _refuse_missing(self) -> None:
        """Raise SourceError naming samples that the source lacks, unless they keep their texts."""
        missing, first = 0, list[str]()
        for shard in range(self._spec.num_shards):
            rows = self._plan.shard(shard, ["id", "state"])
            is_missing = ~self._is_there[self._rows(shard)] & ~is_withdrawn(rows)
            missing += int(is_missing.sum())
            first = nsmallest(SHOWN_NAMES, [*first, *rows["id"].filter(pa.array(is_missing)).to_pylist()])
        if missing and not self._keeps:
            raise SourceError(
                f"the source lacks {counted(missing, 'sample')} of {self._store}: {abridge(first, missing)}; name one "
                "that has them, or add --keep_missing true: they then keep their texts"
            )
        self._kept = missing

    def _rows(self, shard: int) -> slice:
        rows = self._spec.shard_rows(shard)
        return slice(rows.start, rows.stop)

    def _texts_of(self, shard: int) -> pa.Table:
        """Return ids, conversations and extra columns of a shard's rows as the source has them; count what changed."""
        before, rows = self._plan.shard(shard), self._rows(shard)
        is_there = self._is_there[rows]
        now = read_rows(self._found, self._places[rows])
        is_there &= pc.equal(now["id"], before["id"]).to_numpy()
        names = [*TEXTS_SCHEMA.names, *extra_columns(now.schema)]
        columns = {"id": before["id"]}
        for name in names:
            field = now.schema.field(name)
            held = before[name] if name in before.column_names and before.schema.field(name) == field else None
            kept = pa.nulls(len(before), field.type) if held is None else held
            columns[name] = pc.if_else(pa.array(is_there), now[name], kept)
        table = without_samples(pa.table(columns), is_withdrawn(before))
        self._compare(before.drop_columns([name for name in PLAN_SCHEMA.names if name != "id"]), table)
        return table

    def _compare(self, before: pa.Table, now: pa.Table) -> None:
        if before.equals(now):
            return
        pairs = zip(before.to_pylist(), now.to_pylist(), strict=True)
        changed = [then["id"] for then, each in pairs if then != each]
        self._changed += len(changed)
        self._first = nsmallest(SHOWN_NAMES, [*self._first, *changed])
