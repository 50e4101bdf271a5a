"""Refusing a list too many of whose images, or texts, are not there, before anything is encoded."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from cache_store.errors import SourceError
from cache_store.refusal import counted
from cache_store.storage.store import is_url
from precompute.plan.ids import abridged
from precompute.plan.rows import Rows
from precompute.sources import SourceConfig
from precompute.sources.archives.archive import MISSING
from precompute.sources.archives.image_store import folder_below, is_unsafe
from precompute.sources.files.urls import split_url
from precompute.sources.turns import answer_of


def refuse_missing_images(found: Rows, source: SourceConfig, allowed: float) -> int:
    """Known before anything is encoded: a wrong folder should not cost an hour. Returns how many are missing."""
    tables = found.shards(["id", "uri", "fingerprint"])
    missing = pa.concat_tables([table.filter(pc.equal(table["fingerprint"], MISSING)) for table in tables])
    if missing.num_rows > allowed * len(found):
        reasons, advice = zip(*why_missing(missing, source), strict=True)
        raise SourceError(
            f"{missing.num_rows} of {len(found)} samples without an image: {'; '.join(reasons)}. That is more "
            f"than run.max_reject_fraction {allowed:g} allows; nothing was encoded. {'. '.join(advice)}"
        )
    return int(missing.num_rows)


def refuse_missing_texts(found: Rows, source: SourceConfig, allowed: float) -> None:
    """SourceError where more samples than are allowed have no text for a text encoder."""
    tables = found.shards(["id", "conversations"])
    pairs = (zip(table["id"].to_pylist(), table["conversations"].to_pylist(), strict=True) for table in tables)
    without = [name for pair in pairs for name, turns in pair if not answer_of(turns)]
    if len(without) > allowed * len(found):
        raise SourceError(
            f"{len(without)} of {len(found)} samples of {source.path} without a {source.text}: {abridged(without)}. "
            f"That is more than run.max_reject_fraction {allowed:g} allows; nothing was encoded. "
            f"{WHERE_TEXTS_ARE[source.kind]}"
        )


WHERE_TEXTS_ARE = {
    "llava": "Give each record an answer in its conversations",
    "folder": "Put each caption beside its image, as name.txt",
    "webdataset": "Put a .txt, or a .json with caption, beside each image",
    "parquet": "Name the column with source.fields.caption, or source.fields.conversations",
    "cache": "That cache's samples were planned without texts; plan another from a source that has them",
}


def why_missing(missing: pa.Table, source: SourceConfig) -> Iterator[tuple[str, str]]:
    """Each reason that there is for images to be missing, and what to do about it."""
    is_unnamed = pc.equal(missing["uri"], "")
    unnamed, named = missing.filter(is_unnamed)["id"], missing.filter(pc.invert(is_unnamed))["uri"]
    if len(named):
        where = source.images or (folder_of(source.path) if source.kind == "llava" else source.path)
        shown = where if is_url(where) else Path(where).expanduser().resolve()  # "." would read as a full stop
        mend = f"Mend {shown}"
        if source.kind == "llava":
            below = None if is_url(where) else folder_below(Path(where), named[0].as_py())
            mend = f"Set source.images to {below}, where they are" if below else "Set source.images, or mend it"
        outside = [name for name in named.to_pylist() if is_unsafe(name)]
        why = f"; not a name inside it: {abridged(outside)}" if outside else ""
        yield f"{abridged(named.to_pylist())}; looked in {shown}{why}", mend
    if len(unnamed):
        yield (
            f"{counted(len(unnamed), 'record')} without the name of one: {abridged(unnamed.to_pylist())}",
            f"Give each such record an `image`, or leave it out of {source.path}",
        )


def folder_of(path: str) -> str:
    return split_url(path)[0] if is_url(path) else str(Path(path).parent)
