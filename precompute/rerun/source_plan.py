"""Make a plan from a source's samples; this takes the memory of one shard plus 8 bytes per sample, or the ids to sort.

A new cache keeps the source's order for tars, Parquet files, JSON Lines and another cache. Samples of folders, archives
and JSON lists have no fixed order, so they are sorted by id: Arrow sorts runs of them into a file, then the runs are
merged. Each run is sorted, so neighbours in the final order are neighbours in every run, and few pages are read twice.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache_store.errors import SourceError
from cache_store.format.plan import Plan, caption_of
from cache_store.messages import abridge, counted
from cache_store.storage.store import is_url, split_url
from precompute.config import BuildConfig
from precompute.images.rejected import CONTINUE
from precompute.inputs import Reader
from precompute.rerun.extra import ExtraColumns
from precompute.rerun.match_rows import reorder, with_withdrawn
from precompute.rerun.rows import (
    LISTED,
    Hashes,
    ListedRows,
    hashes_of,
    listed_table,
    rows_in_scratch,
    slices_of,
)
from precompute.sources.config import SOURCES, SourceConfig
from precompute.sources.image_store import folder_below, is_unsafe
from precompute.sources.images import Source
from precompute.sources.listing import Samples
from precompute.sources.place import MISSING

MAX_ID_BYTES = 2**14
"""An id stands in the plan, in a samples table and in messages; the longest path of a file has 4 KB."""

RUN_ROWS = 2**17
"""Rows sorted or merged at a time: 100 MB if a sample's texts take 250 bytes."""

PAGE_ROWS = 2**10
"""Rows read at a time; ten million samples make 77 runs, and each merged block needs two pages of each run."""


@dataclass(frozen=True, kw_only=True)
class SourceList:
    """A source's samples, as one run listed them."""

    rows: ListedRows
    num_missing: int
    """Samples without an image."""
    note: str
    """Note on the source's other files; may be empty."""
    warnings: Sequence[str]
    """Lines on masks and missing captions."""


def list_source(
    source: Source,
    reader: Reader,
    config: BuildConfig,
    planned: Plan | None = None,
    *,
    has_same_clips: bool = False,
) -> SourceList:
    """List the source as a plan for this config; samples that were withdrawn from `planned` stay withdrawn.

    `has_same_clips` tells that `planned` was made with the same `clip:`, so that its videos need no second look. Raises
    SourceError if too many images, or texts, are missing.
    """
    samples = reader.samples(source.samples(), planned if has_same_clips else None)
    rows = make_plan(samples, config.store.samples_per_shard, f"source.path: {config.source.path}")
    if planned is not None:
        rows = with_withdrawn(rows, planned)
    allowed = config.run.max_reject_fraction
    if config.source.text:
        num_missing = refuse_missing_texts(rows, config.source, allowed)
    else:
        num_missing = refuse_missing_images(rows, config.source, allowed, config.media.name)
    warnings = [*samples.warnings(SOURCES[config.source.kind].add_texts)]
    return SourceList(rows=rows, num_missing=num_missing, note=samples.note, warnings=warnings)


def make_plan(samples: Samples, samples_per_shard: int, source: str = "the source") -> ListedRows:
    """Plan the samples, sorted by id unless they are in rows; raise SourceError for duplicate ids or no samples."""
    extra, hashes = ExtraColumns(samples.extra, source), list[Hashes]()
    rows, schema = extra.as_text(samples), extra.listed
    if samples.in_rows:
        shards = iter(lambda: listed_table(islice(rows, samples_per_shard), schema), schema.empty_table())
    else:
        shards = sorted_by_id(rows, samples_per_shard, schema=schema)

    def hashed() -> Iterator[pa.Table]:
        for shard in shards:
            refuse_long_ids(shard, source)
            hashes.append(hashes_of(shard["id"].to_pylist()))
            yield shard

    listed = rows_in_scratch(hashed(), samples.parts)
    if not len(listed):
        raise SourceError("; ".join(filter(None, [f"{source} holds no samples", samples.note])))
    plan = extra.typed(listed)
    refuse_duplicates(plan, np.concatenate(hashes), source)
    return plan


def sorted_by_id(
    samples: Iterator[dict[str, object]],
    samples_per_shard: int,
    run_rows: int = RUN_ROWS,
    page_rows: int = PAGE_ROWS,
    schema: pa.Schema = LISTED,
) -> Iterator[pa.Table]:
    """Sort all samples by id; yield them as shards."""
    ids = list[pa.Array]()

    def pages() -> Iterator[pa.Table]:
        while (run := listed_table(islice(samples, run_rows), schema).sort_by("id").combine_chunks()).num_rows:
            ids.extend(run["id"].cast(pa.large_string()).chunks)
            yield from slices_of(run, page_rows)
            del run  # before the next one is made

    runs = rows_in_scratch(pages())
    order = pc.sort_indices(pa.chunked_array(ids, pa.large_string())).to_numpy()
    ids.clear()
    return reorder(runs, order, samples_per_shard, run_rows)


def refuse_long_ids(shard: pa.Table, source: str) -> None:
    lengths = pc.binary_length(shard["id"])
    if (longest := pc.max(lengths).as_py() or 0) > MAX_ID_BYTES:
        begins = shard["id"][pc.index(lengths, longest).as_py()].as_py()[:20]
        raise SourceError(
            f"{source}: a sample id of {longest:,} bytes, more than {MAX_ID_BYTES:,}, begins {abridge([begins])}"
        )


def refuse_duplicates(plan: ListedRows, hashes: Hashes, source: str) -> None:
    """Raise SourceError naming duplicate ids and two images of the first; ids with equal hashes are compared."""
    ordered = np.sort(hashes)
    repeated = pa.array(np.unique(ordered[1:][ordered[1:] == ordered[:-1]]))
    if not len(repeated):
        return
    uris = defaultdict[str, list[str]](list)
    for shard, table in enumerate(plan.shards(["id", "uri"])):
        first = plan.bounds[shard]
        is_suspect = pc.is_in(pa.array(hashes[first : first + table.num_rows]), value_set=repeated)
        for sample in table.filter(is_suspect).to_pylist():
            if len(uris[sample["id"]]) < 2:
                uris[sample["id"]].append(sample["uri"] or "none")
    if names := sorted(name for name, images in uris.items() if len(images) > 1):
        raise SourceError(
            f"{source}: {counted(len(names), 'sample id')} came more than once: {abridge(names)} (first with "
            f"the images {abridge(uris[names[0]])}); give each sample an id of its own, or leave out all but one"
        )


def refuse_missing_images(found: ListedRows, source: SourceConfig, allowed: float, media: str) -> int:
    """Raise SourceError if too many images are missing, before an hour of encoding; return how many are missing."""
    tables = found.shards(["id", "uri", "fingerprint"])
    missing = pa.concat_tables([table.filter(pc.equal(table["fingerprint"], MISSING)) for table in tables])
    if missing.num_rows > allowed * len(found):
        reasons, advice = zip(*why_missing(missing, source), strict=True)
        raise SourceError(
            f"{missing.num_rows} of {len(found)} samples without their {media}: {'; '.join(reasons)}. That is more "
            f"than run.max_reject_fraction {allowed:g} allows; nothing was encoded. {'. '.join(advice)}; {CONTINUE}"
        )
    return int(missing.num_rows)


def refuse_missing_texts(found: ListedRows, source: SourceConfig, allowed: float) -> int:
    """Raise SourceError if too many samples have no text for a text encoder; return 0, because texts do not come back.

    A text stands in the plan, so another list is another plan.
    """
    tables = (table.filter(table["conversations"].is_valid()) for table in found.shards(["id", "conversations"]))
    pairs = (zip(table["id"].to_pylist(), table["conversations"].to_pylist(), strict=True) for table in tables)
    without = [name for pair in pairs for name, turns in pair if caption_of(turns) is None]
    if len(without) > allowed * len(found):
        raise SourceError(
            f"{len(without)} of {len(found)} samples of {source.path} without a {source.text}: {abridge(without)}. "
            f"That is more than run.max_reject_fraction {allowed:g} allows; nothing was encoded. "
            f"{SOURCES[source.kind].add_texts}; {CONTINUE}"
        )
    return 0


def why_missing(missing: pa.Table, source: SourceConfig) -> Iterator[tuple[str, str]]:
    """Yield each reason why images are missing, and what to do about it."""
    is_unnamed = pc.equal(missing["uri"], "")
    unnamed, named = missing.filter(is_unnamed)["id"], missing.filter(pc.invert(is_unnamed))["uri"]
    if len(named):
        is_list = not SOURCES[source.kind].images_are
        where = source.images or (folder_of(source.path) if is_list else source.path)
        shown = where if is_url(where) else Path(where).expanduser().resolve()  # "." would read as a full stop
        mend = f"Mend {shown}"
        if is_list:
            below = None if is_url(where) else folder_below(Path(where), named[0].as_py())
            mend = f"Set source.images to {below}, where they are" if below else "Set source.images, or mend it"
        outside = [name for name in named.to_pylist() if is_unsafe(name)]
        why = f"; not a name inside it: {abridge(outside)}" if outside else ""
        yield f"{abridge(named.to_pylist())}; looked in {shown}{why}", mend
    if len(unnamed):
        yield (
            f"{counted(len(unnamed), 'text-only record')} without an image: {abridge(unnamed.to_pylist())}",
            f"Leave text-only records out of {source.path}, or give each an `image`",
        )


def folder_of(path: str) -> str:
    return split_url(path)[0] if is_url(path) else str(Path(path).parent)
