"""A small real cache for tests, written through the product's own writer, without images or an encoder."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from cache_store.metadata import write_build, write_spec
from cache_store.plan import plan_digest, write_plan
from cache_store.schema import (
    PLAN_FILE,
    PLAN_SCHEMA,
    ArraySpec,
    CodecName,
    EncoderIdentity,
    ImageRecipe,
    Spec,
    StoreDtype,
    StoreFormat,
)
from cache_store.seal import seal_cache
from cache_store.shard_builder import Outcome, ShardBuilder

Conversation = list[dict[str, str]]


def caption(text: str) -> Conversation:
    return [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": text}]


def make_cache(
    path: Path,
    latents: np.ndarray,
    ids: Sequence[str] | None = None,
    conversations: Sequence[Conversation] | None = None,
    *,
    rejected: Sequence[int] = (),
    samples_per_shard: int = 8,
    store_format: StoreFormat = "zarr",
    dtype: StoreDtype = "float16",
    codec: CodecName = "none",
    posterior: str = "mean",
    batch_size: int = 4,
    latents_mean: Sequence[float] | None = None,
    latents_std: Sequence[float] | None = None,
    seal: bool = True,
) -> Path:
    """Write `latents` [N, C, H, W] float32 as a cache; rows in `rejected` are planned but not cached."""
    count, channels, height, width = latents.shape
    ids = list(ids) if ids is not None else [f"sample-{row:06d}" for row in range(count)]
    conversations = conversations or [caption(f"this is {name}") for name in ids]
    plan = pa.table(
        {
            "row": range(count),
            "id": ids,
            "uri": [f"{name}.png" for name in ids],
            "conversations": conversations,
            "fingerprint": ["0:0"] * count,
        },
        schema=PLAN_SCHEMA,
    )
    z_dim = channels // 2 if posterior == "moments" else channels
    encoder = EncoderIdentity(
        class_name="AutoencoderKLWan",
        weights_sha256="0" * 64,
        path="folded",
        compiled=False,
        posterior=posterior,
        compute_dtype="float32",
        batch_size=batch_size,
        latents_mean=tuple(latents_mean or [0.0] * z_dim),
        latents_std=tuple(latents_std or [1.0] * z_dim),
    )
    image = ImageRecipe(
        height=8 * height,
        width=8 * width,
        fit="squash",
        resample="bilinear",
        range="signed",
        max_pixels=10**8,
    )
    array = ArraySpec(shape=(channels, height, width), dtype=dtype, codec=codec, image=image, encoder=encoder)
    spec = Spec(
        format_version=1,
        store_format=store_format,
        rows=count,
        samples_per_shard=samples_per_shard,
        plan_digest=plan_digest([plan]),
        arrays={"latents": array},
    )
    write_plan(
        path / PLAN_FILE,
        [plan.slice(rows[0], len(rows)) for rows in map(spec.shard_rows, range(spec.num_shards))],
    )
    write_build(path, {})
    write_spec(path, spec)
    rgb = np.random.default_rng(0).random((count, height, width, 3), np.float32)
    for shard in range(spec.num_shards):
        rows = spec.shard_rows(shard)
        planned = plan.slice(rows.start, len(rows))
        with ShardBuilder(path, spec, "latents", shard, planned) as builder:
            for first in range(rows.start, rows.stop, batch_size):
                chunk = slice(first, min(first + batch_size, rows.stop))
                outcomes = [outcome(row, row in rejected) for row in range(chunk.start, chunk.stop)]
                builder.append(latents[chunk], rgb[chunk], outcomes)
            builder.commit(seconds=1.0, device="cpu", versions={})
    if seal:
        seal_cache(path, spec)
    return path


def outcome(row: int, is_rejected: bool) -> Outcome:
    if is_rejected:
        return Outcome(content_sha256=None, width=None, height=None, reason="missing: no such file")
    return Outcome(content_sha256=f"{row:064x}", width=64, height=48, reason=None)
