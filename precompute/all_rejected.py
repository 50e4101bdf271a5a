"""A build in which no sample could be cached: every kind of reason, how often it occurs, and a sample that has it."""

from pathlib import Path

from cache_store.errors import EncodeOnceError
from cache_store.schema import Spec, reason_kind, samples_file
from cache_store.staleness import aligned, plain
from cache_store.tables import read_table
from precompute.acts import Acts

OF_THE_LATENT = "latent "
"""Kinds of reasons that begin so are the encoder's or the store's doing: trying again would give the same."""


def refuse_all_rejected(root: Path, spec: Spec, acts: Acts) -> None:
    """EncodeOnceError where every sample is rejected."""
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    for shard in range(spec.num_shards):
        samples = read_table(root / samples_file(shard), ["id", "reason"])
        for name, reason in zip(samples["id"].to_pylist(), samples["reason"].to_pylist(), strict=True):
            if reason is None:
                return  # not so, by a table that is damaged
            kind = reason_kind(reason)
            counts[kind] = counts.get(kind, 0) + 1
            examples.setdefault(kind, f"{name}: {reason}")
    rows = [(kind, f"{counts[kind]:,}", plain(examples[kind])) for kind in sorted(counts)]
    table = aligned([("reason", "samples", "one of them"), *rows])
    summary = f"{root}: none of {spec.rows:,} samples could be cached, so there is nothing to seal"
    raise EncodeOnceError("\n  ".join([summary, *table, *advice(counts, acts)]))


def advice(kinds: dict[str, int], acts: Acts) -> list[str]:
    """What can help, by who is at fault."""
    lines = []
    if any(not kind.startswith(OF_THE_LATENT) for kind in kinds):
        lines.append(f"mend the images or source.images, then: {acts.with_options('--retry-rejected')}")
    if any(kind.startswith(OF_THE_LATENT) for kind in kinds):
        lines.append("latents need more range: set encoder.compute_dtype and store.dtype to float32, in another cache")
    return lines
