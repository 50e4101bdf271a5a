"""The table of rejected samples, and the advice, with which a build ends that rejects too many."""

from collections.abc import Iterable, Iterator
from typing import NoReturn

from cache_store.cache.metadata import read_samples
from cache_store.errors import CacheError, EncodeOnceError
from cache_store.format.schema import Spec
from cache_store.format.tables import WITHDRAWN, reason_kind
from cache_store.messages import align_rows, printable
from cache_store.storage.store import Store

LATENT_REASON = "latent "
"""Reasons with this prefix come from the encoder or the store; a retry would give the same result."""


def refuse_rejected(problem: str, store: Store, spec: Spec, retry: str, *more: str) -> NoReturn:
    """Raise EncodeOnceError with the problem, a table of the samples rejected so far, and the command to `retry`."""
    kinds = rejected_kinds(store, spec)
    rows = [(kind, f"{count:,}", printable(example)) for kind, (count, example) in sorted(kinds.items())]
    table = align_rows([("reason", "samples", "one of them"), *rows])
    raise EncodeOnceError("\n  ".join([problem, *table, *reject_advice(kinds, retry), *more])) from None


def rejected_kinds(store: Store, spec: Spec) -> dict[str, tuple[int, str]]:
    """Count how many samples of committed shards are rejected for each kind of reason, and the first of them."""
    kinds: dict[str, tuple[int, str]] = {}
    for shard in range(spec.num_shards):
        try:
            samples = read_samples(store, shard, ["id", "reason"])
        except CacheError:
            continue  # not built yet
        for name, reason in zip(samples["id"].to_pylist(), samples["reason"].to_pylist(), strict=True):
            if reason not in (None, WITHDRAWN):
                count, example = kinds.get(reason_kind(reason), (0, f"{name}: {reason}"))
                kinds[reason_kind(reason)] = (count + 1, example)
    return kinds


def reject_advice(kinds: Iterable[str], retry: str) -> Iterator[str]:
    if any(not kind.startswith(LATENT_REASON) for kind in kinds):
        yield f"fix the images, or their paths in the source, then run: {retry}"
    if any(kind.startswith(LATENT_REASON) for kind in kinds):
        yield (
            "latents do not fit the dtype: set encoder.compute_dtype and store.dtype to float32, in a new cache; if "
            "both are float32 already, check the model's weights"
        )
