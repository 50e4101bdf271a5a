"""Finding rejected samples that would succeed now, without an encoder."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

from cache_store.errors import CacheError
from cache_store.format.schema import REJECTED, CommitRecord, ImageRecipe, samples_file
from cache_store.format.tables import read_table
from cache_store.program.progress_bar import progress_bar
from precompute.images.decode import decode_image, fit_image
from precompute.images.rejected import Rejected
from precompute.sources import Source


@dataclass(frozen=True)
class Retry:
    """Rejected samples tried again."""

    tried: int
    rejected_before: dict[int, int]
    """The shards to build again, those with a sample that gives pixels now, and how many each had rejected."""


def try_rejected(root: Path, records: list[CommitRecord], source: Source, recipe: ImageRecipe, threads: int) -> Retry:
    """Read, decode and fit every rejected sample of the shards that `records` are of."""
    tried = 0
    again: dict[int, int] = {}
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="retry") as pool,
        progress_bar(
            total=sum(each.content.rejected for each in records), desc="retry", unit="image", delay=0.5
        ) as bar,
    ):
        for content in (record.content for record in records if record.content.rejected):
            outcomes = list(pool.map(lambda uri: gives_pixels(source, uri, recipe), rejected_uris(root, content.shard)))
            tried += len(outcomes)
            if any(outcomes):
                again[content.shard] = content.rejected
            bar.update(len(outcomes))
    return Retry(tried, again)


def rejected_uris(root: Path, shard: int) -> Iterator[str]:
    """None of a shard whose samples table is damaged: a verification names that."""
    try:
        samples = read_table(root / samples_file(shard), ["uri", "status"])
    except CacheError:
        return
    yield from samples.filter(pc.equal(samples["status"], REJECTED))["uri"].to_pylist()


def gives_pixels(source: Source, uri: str, recipe: ImageRecipe) -> bool:
    try:
        fit_image(decode_image(source.read(uri), recipe.max_pixels), recipe)
    except Rejected:
        return False
    return True
