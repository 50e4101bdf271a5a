"""Rejected samples: trying them again on request, and listing them by reason where they end a build."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pyarrow.compute as pc

from cache_store.cache.files import read_samples
from cache_store.errors import CacheError, EncodeOnceError
from cache_store.format.schema import ImageRecipe, Spec
from cache_store.format.tables import REJECTED, reason_kind
from cache_store.program.progress_bar import progress_bar
from cache_store.refusal import aligned, printable
from cache_store.storage.store import Store
from precompute.images.decode import decode_image
from precompute.images.fit import fit_image
from precompute.images.rejected import Rejected
from precompute.resume.decide import Work
from precompute.resume.images import recorded_samples
from precompute.resume.request import BuildRequest
from precompute.sources import Source

OF_THE_LATENT = "latent "
"""Reasons that begin so come from the encoder or the store: trying again would give the same."""


def try_rejected(store: Store, work: Work, source: Source, threads: int) -> tuple[int, dict[int, int]]:
    """Read, decode and fit every rejected sample of the shards that are kept, without an encoder; how many there were.

    And the shards to build again, since one of their samples can be decoded now, with how many each had rejected.
    """
    tried, again, recipe = 0, dict[int, int](), work.spec.array.images
    counts = {shard: record.content.rejected for shard, record in work.kept.items() if record.content.rejected}
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="retry") as pool,
        progress_bar(total=sum(counts.values()), desc="retry", unit="image", delay=0.5) as bar,
    ):
        for shard, count in counts.items():
            samples = recorded_samples(store, work.kept[shard], ["status"])
            if samples is None:
                continue  # it is damaged: a verification names that
            planned = work.planned(shard, ["uri"]).slice(0, samples.num_rows)
            rejected = planned.filter(pc.equal(samples["status"], REJECTED))["uri"].to_pylist()
            outcomes = list(pool.map(lambda uri: gives_pixels(source, uri, recipe), rejected))
            tried += len(outcomes)
            if any(outcomes):
                again[shard] = count
            bar.update(len(outcomes))
    return tried, again


def gives_pixels(source: Source, uri: str, recipe: ImageRecipe) -> bool:
    try:
        fit_image(decode_image(source.read(uri), recipe), recipe)
    except Rejected:
        return False
    return True


def refuse_rejected(problem: str, store: Store, spec: Spec, request: BuildRequest, *more: str) -> NoReturn:
    """EncodeOnceError of the problem, what was rejected so far, and what can be done."""
    kinds = rejected_kinds(store, spec)
    raise EncodeOnceError("\n  ".join([problem, *table_of(kinds), *advice(kinds, request), *more])) from None


def rejected_kinds(store: Store, spec: Spec) -> dict[str, tuple[int, str]]:
    """Count how many samples of committed shards are rejected for each kind of reason, and the first of them."""
    kinds: dict[str, tuple[int, str]] = {}
    for shard in range(spec.num_shards):
        try:
            samples = read_samples(store, shard, ["id", "reason"])
        except CacheError:
            continue  # not built yet
        for name, reason in zip(samples["id"].to_pylist(), samples["reason"].to_pylist(), strict=True):
            if reason is not None:
                count, example = kinds.get(reason_kind(reason), (0, f"{name}: {reason}"))
                kinds[reason_kind(reason)] = (count + 1, example)
    return kinds


def table_of(kinds: dict[str, tuple[int, str]]) -> list[str]:
    rows = [(kind, f"{count:,}", printable(example)) for kind, (count, example) in sorted(kinds.items())]
    return aligned([("reason", "samples", "one of them"), *rows])


def advice(kinds: Iterable[str], request: BuildRequest) -> list[str]:
    """Say what can help, by what is at fault."""
    lines = []
    if any(not kind.startswith(OF_THE_LATENT) for kind in kinds):
        lines.append(
            f"mend the images, or where the source says they are, then: {request.with_options('--retry-rejected')}"
        )
    if any(kind.startswith(OF_THE_LATENT) for kind in kinds):
        lines.append(
            "latents need more range: set encoder.compute_dtype and store.dtype to float32, in another cache; where "
            "both are, check the model's weights"
        )
    return lines
