"""`precompute captions`: read the texts of a cache's samples again. Every latent stays; only texts encode anew."""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from cache_store.cache.metadata import (
    extra_kinds,
    open_part,
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
from cache_store.format.plan import encoded_texts_digest, extra_columns
from cache_store.format.schema import PartTexts, Spec
from cache_store.format.tables import TEXTS_SCHEMA
from cache_store.messages import BUILD_AGAIN, counted
from cache_store.storage.store import Address, Store, open_store
from cache_store.verify.verify import clear_leftovers
from precompute.build.listing import ListedParts, joined
from precompute.build.match import Found, Matcher, SomeIds
from precompute.build.source import refuse_empty_columns
from precompute.config import BuildConfig, CaptionsConfig, advising_on_moved_paths
from precompute.inputs import make_reader
from precompute.sources.images import Names
from precompute.sources.listing import Samples
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


def list_texts(store: Store, spec: Spec, config: CaptionsConfig) -> ListedParts:
    """List the samples of the source that is named, or of the cache's own."""
    built, image = BuildConfig.of_cache(store), spec.array.image
    chosen = recognised(config.source if config.source.path else built.source)
    source = open_source(chosen, built.media)

    def list_part(names: Names) -> Samples:
        samples = source.samples(names)
        if image and image.clip and not config.source.path:
            planned = (open_part(store, part).whole() for part in range(len(spec.parts)))
            samples = make_reader(source, spec.array, clips=built.clip).samples(samples, planned)
        return samples

    return ListedParts(list_part, source.parts(built.store.rows_per_part), replace(built, source=chosen))


class Recaption:
    """The texts of a cache's samples as a source has them now; the caller holds the claim."""

    def __init__(self, store: Store, spec: Spec, found: ListedParts, *, keep_missing: bool) -> None:
        self._store, self._spec, self._found, self._keeps = store, spec, found, keep_missing
        self._plan = open_plan(store, spec)
        self._records = survey_records(store).records if spec.array.text else {}
        self._changed, self._missing, self._stale = SomeIds(), SomeIds(), 0

    def carry_out(self) -> Recaptioned:
        """Write the texts of every part, and put them in force at the end; SourceError if some are missing."""
        store, before, parts = self._store, self._plan.texts, dict[int, PartTexts]()
        matcher = Matcher(len(self._spec.parts), lambda part: open_part(store, part).whole(), lambda *_: None)
        for found in matcher.find(self._found):
            parts[found.part] = put_texts(store, found.part, self._texts_of(found), before.parts[found.part])
        if self._missing.total and not self._keeps:
            clear_leftovers(store, self._spec)
            raise SourceError(
                f"the source lacks {counted(self._missing.total, 'sample')} of {store}: {self._missing}; name one that "
                "has them, or add --keep_missing true: they then keep their texts"
            )
        texts = [each for _, each in sorted(parts.items())]
        extra = extra_kinds(store, parts)
        refuse_empty_columns(extra, self._found.where)
        if self._stale:
            store.delete(SEAL_FILE)  # the samples of a sealed cache are those of its texts
        if tuple(texts) != before.parts:
            put_in_force(store, texts, before.parts)
            store.make_durable(TEXTS_FILE)
        clear_leftovers(store, self._spec)
        kept = self._missing.total
        return Recaptioned(changed=self._changed, extra=tuple(extra), kept=kept, shards=self._stale)

    def _texts_of(self, found: Found) -> list[pa.Table]:
        """Return ids, conversations and extra columns of a part's shards, as the source has them."""
        before, now, lacks = self._plan.part_rows(found.part), found.rows, found.lacks
        names = [*TEXTS_SCHEMA.names, *extra_columns(now.schema)]
        now = now.select(names)
        if lacks.any():
            self._missing = self._missing.with_more(before["id"].filter(pa.array(lacks)))
            both = joined([now, before.select([name for name in names if name in before.column_names])])
            now = both.take(np.arange(len(lacks)) + lacks * len(lacks))
        now = now.add_column(0, "id", before["id"])
        self._count_changed(before.select(["id", *TEXTS_SCHEMA.names, *extra_columns(before.schema)]), now)
        shards, first = self._spec.part_shards[found.part], self._spec.bounds[self._spec.part_shards[found.part].start]
        tables = [now.slice(rows.start - first, len(rows)) for rows in map(self._spec.shard_rows, shards)]
        for shard, table in zip(shards, tables, strict=True):
            if self._spec.array.text and shard in self._records:
                digest = encoded_texts_digest(self._spec.array.text, table)
                self._stale += digest != self._records[shard].content.texts
        return tables

    def _count_changed(self, before: pa.Table, now: pa.Table) -> None:
        if before.equals(now):
            return
        pairs = zip(before.to_pylist(), now.to_pylist(), strict=True)
        changed = [then["id"] for then, each in pairs if then != each]
        self._changed = self._changed.with_more(pa.chunked_array([changed], pa.string()))
