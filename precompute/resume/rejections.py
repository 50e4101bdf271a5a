"""A build that its rejected samples end: every kind of reason, how often it occurs, and a sample that has it."""

from pathlib import Path

from cache_store.errors import CacheError, EncodeOnceError
from cache_store.format.schema import Spec, reason_kind, samples_file
from cache_store.format.tables import read_table
from cache_store.refusal import aligned, plain
from precompute.images.rejected import TooManyRejectsError
from precompute.resume.request import Acts

OF_THE_LATENT = "latent "
"""Kinds of reasons that begin so are the encoder's or the store's doing: trying again would give the same."""


def refuse_all_rejected(root: Path, spec: Spec, acts: Acts) -> None:
    """EncodeOnceError where every sample is rejected."""
    kinds = rejected_kinds(root, spec)
    if sum(count for count, _ in kinds.values()) == spec.rows:  # else a table is damaged, and says it is not so
        summary = f"{root}: none of {spec.rows:,} samples could be cached, so there is nothing to seal"
        raise EncodeOnceError("\n  ".join([summary, *table_of(kinds), *advice(kinds, acts)]))


def too_many(error: TooManyRejectsError, root: Path, spec: Spec, acts: Acts) -> EncodeOnceError:
    """The error, with what was rejected so far and what can be done."""
    kinds = rejected_kinds(root, spec)
    allow = "to go on without such samples, allow more of them with --run.max_reject_fraction"
    return EncodeOnceError("\n  ".join([str(error), *table_of(kinds), *advice(kinds, acts), allow]))


def rejected_kinds(root: Path, spec: Spec) -> dict[str, tuple[int, str]]:
    """How many samples of committed shards are rejected for each kind of reason, and the first of them."""
    kinds: dict[str, tuple[int, str]] = {}
    for shard in range(spec.num_shards):
        try:
            samples = read_table(root / samples_file(shard), ["id", "reason"])
        except CacheError:
            continue  # not built yet
        for name, reason in zip(samples["id"].to_pylist(), samples["reason"].to_pylist(), strict=True):
            if reason is not None:
                count, example = kinds.get(reason_kind(reason), (0, f"{name}: {reason}"))
                kinds[reason_kind(reason)] = (count + 1, example)
    return kinds


def table_of(kinds: dict[str, tuple[int, str]]) -> list[str]:
    rows = [(kind, f"{count:,}", plain(example)) for kind, (count, example) in sorted(kinds.items())]
    return aligned([("reason", "samples", "one of them"), *rows])


def advice(kinds: dict[str, tuple[int, str]], acts: Acts) -> list[str]:
    """What can help, by who is at fault."""
    lines = []
    if any(not kind.startswith(OF_THE_LATENT) for kind in kinds):
        lines.append(f"mend the images or source.images, then: {acts.with_options('--retry-rejected')}")
    if any(kind.startswith(OF_THE_LATENT) for kind in kinds):
        lines.append("latents need more range: set encoder.compute_dtype and store.dtype to float32, in another cache")
    return lines
