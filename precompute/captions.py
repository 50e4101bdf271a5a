"""`precompute captions`: read the texts of a cache's samples again. Every latent stays; only texts encode anew."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

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
from cache_store.errors import CacheError, ConfigError, EncodeOnceError, SourceError
from cache_store.format.layout import SEAL_FILE, TEXTS_FILE
from cache_store.format.plan import Plan, encoded_texts_digest, extra_columns
from cache_store.format.schema import PartTexts, Spec
from cache_store.format.tables import TEXTS_SCHEMA
from cache_store.messages import BUILD_AGAIN, counted
from cache_store.storage.store import Address, Store, open_store
from cache_store.verify.verify import clear_leftovers
from precompute.build.planning import ListedParts
from precompute.build.source import Found, Matcher, SomeIds, match, refuse_empty_columns
from precompute.config import BuildConfig, CaptionsConfig, advising_on_moved_paths
from precompute.inputs import make_reader
from precompute.sources.config import SourceConfig
from precompute.sources.images import Names
from precompute.sources.listing import Samples
from precompute.sources.lists import TableSource
from precompute.sources.opening import open_source, recognised
from precompute.sources.tables import joined


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
        with nullcontext() if config.source.path else advising_on_moved_paths(cache):
            listing = list_texts(store, spec, config)
            try:
                return recaption(store, spec, listing, keep_missing=config.keep_missing)
            except EncodeOnceError:
                clear_leftovers(store, spec)
                raise


def list_texts(store: Store, spec: Spec, config: CaptionsConfig) -> ListedParts:
    """List the samples of the source that is named, or of the cache's own, perhaps with other fields."""
    built, image = BuildConfig.of_cache(store), spec.array.image
    chosen: SourceConfig = config.source
    if not chosen.path:
        given = {name: value for name, value in asdict(chosen.fields).items() if value}
        chosen = replace(built.source, fields=replace(built.source.fields, **given))
    source = open_source(chosen := recognised(chosen), built.media)
    if isinstance(source, TableSource):
        source.needs_images = False

    def list_part(names: Names) -> Samples:
        samples = source.samples(names)
        if image and image.clip and not config.source.path:
            planned = (open_part(store, part).whole() for part in range(len(spec.parts)))
            samples = make_reader(source, spec.array, clips=built.clip).samples(samples, planned)
        return samples

    return ListedParts(list_part, source.parts(built.store.rows_per_part), replace(built, source=chosen))


def recaption(store: Store, spec: Spec, listing: ListedParts, *, keep_missing: bool) -> Recaptioned:
    """Write the texts of every part as they are listed, then put them in force; SourceError for missing samples."""
    plan, written = open_plan(store, spec), dict[int, PartTexts]()
    held = dict(enumerate(plan.texts.parts)) if has_texts(plan) else {}
    records = survey_records(store).records if spec.array.text else {}
    changed, missing, stale = SomeIds(), SomeIds(), 0
    matcher = Matcher(range(len(spec.parts)), lambda part, table: match(part, open_part(store, part).whole(), table))
    for found in matcher.find(listing):
        try:
            before = plan.part_rows(found.part, ["id", *TEXTS_SCHEMA.names, *plan.extra])
        except CacheError:  # lost or damaged: they are all read again
            ids = plan.part_rows(found.part, ["id"])
            before = ids.append_column(TEXTS_SCHEMA.field(0), pa.nulls(len(ids), TEXTS_SCHEMA.field(0).type))
            held.pop(found.part, None)
        missing = missing.with_more(before["id"].filter(pa.array(found.lacks)))
        now = texts_of(found, before)
        changed = changed.with_more(changed_ids(before, now))
        shards, first = spec.part_shards[found.part], spec.bounds[spec.part_shards[found.part].start]
        tables = [now.slice(rows.start - first, len(rows)) for rows in map(spec.shard_rows, shards)]
        if recipe := spec.array.text:
            pairs = [(records[shard], table) for shard, table in zip(shards, tables, strict=True) if shard in records]
            stale += sum(encoded_texts_digest(recipe, table) != record.content.texts for record, table in pairs)
        written[found.part] = put_texts(store, found.part, tables, held.get(found.part))
    if missing.total and not keep_missing:
        raise SourceError(
            f"the source lacks {counted(missing.total, 'sample')} of {store}: {missing}; name one that has them, or "
            "add --keep_missing true: they then keep their texts"
        )
    refuse_empty_columns(extra := extra_kinds(store, written), listing.where)
    if stale:
        store.delete(SEAL_FILE)  # the samples of a sealed cache are those of its texts
    texts = [each for _, each in sorted(written.items())]
    is_whole = held.keys() == written.keys()
    earlier = [each for _, each in sorted(held.items())] if is_whole else []
    if texts != earlier:
        put_in_force(store, texts, earlier)
        store.make_durable(TEXTS_FILE)
    clear_leftovers(store, spec)
    return Recaptioned(changed=changed, extra=tuple(extra), kept=missing.total, shards=stale)


def has_texts(plan: Plan) -> bool:
    try:
        return bool(plan.texts.parts)
    except CacheError:
        return False


def texts_of(found: Found, before: pa.Table) -> pa.Table:
    """Return ids, conversations and extra columns of a part, as listed; a sample that is not listed keeps its own."""
    names = [*TEXTS_SCHEMA.names, *extra_columns(found.rows.schema)]
    now, lacks = found.rows.select(names), found.lacks
    if lacks.any():
        both = joined([now, before.select([name for name in names if name in before.column_names])])
        now = both.take(np.arange(len(lacks)) + lacks * len(lacks))
    return now.add_column(0, "id", before["id"])


def changed_ids(before: pa.Table, now: pa.Table) -> pa.ChunkedArray:
    if before.equals(now):
        return before["id"].slice(0, 0)
    pairs = zip(before.to_pylist(), now.to_pylist(), strict=True)
    return pa.chunked_array([[then["id"] for then, each in pairs if then != each]], pa.string())
