"""A small real cache for tests, written through the product's own writer, without images or an encoder."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cache_store.cache.commit import sum_up, write_seal
from cache_store.cache.metadata import file_record, metadata_of, put_in_force, put_part, put_texts, write_build
from cache_store.cache.survey import survey_records
from cache_store.cache.writer import Outcome, ShardBuilder
from cache_store.format import array, schema
from cache_store.format.layout import part_file
from cache_store.format.plan import samples_digest
from cache_store.format.tables import CLIP_START, PLAN_SCHEMA, PLANNED, TEXTS_SCHEMA, WITHDRAWN
from cache_store.storage.local import LocalStore

Conversation = list[dict[str, str]]

AXES = {
    1: ("feature",),
    2: ("token", "feature"),
    3: ("channel", "latent_y", "latent_x"),
    4: ("view", "layer", "token", "feature"),
}
"""Names of a sample's axes, by their number."""
CLIP_AXES = ("channel", "latent_t", "latent_y", "latent_x")


def caption(text: str) -> Conversation:
    return [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": text}]


def text_recipe(max_tokens: int) -> array.TextRecipe:
    recipe: dict[str, Any] = {"source": "caption", "clean": "none", "template": "{}", "max_tokens": max_tokens}
    return array.TextRecipe(**recipe, drop=0, keeps_first=False, padding="seen", null_prompt="", null_tokens=1)


def make_cache(
    path: Path,
    latents: np.ndarray | Sequence[np.ndarray],
    ids: Sequence[str] | None = None,
    conversations: Sequence[Conversation] | None = None,
    *,
    rejected: Sequence[int] = (),
    withdrawn: Sequence[int] = (),
    samples_per_shard: int = 8,
    lengths: Sequence[int] = (),
    parts: Sequence[int] = (),
    store_format: schema.StoreFormat = "zarr",
    dtype: array.StoreDtype = "float16",
    codec: array.CodecName = "none",
    batch_size: int = 4,
    latents_mean: Sequence[float] | None = None,
    latents_std: Sequence[float] | None = None,
    posterior: str = "mean",
    image: Mapping[str, Any] | None = None,
    text: array.TextRecipe | None = None,
    extra: Mapping[str, Any] | None = None,
    clips: bool = False,
    seal: bool = True,
) -> Path:
    """Write `latents` [N, *shape] float32 as a cache; rows in `rejected` are planned but not cached.

    Rows that are `withdrawn` in the plan are cached, as no program leaves them.

    Several `latents` are those of images of several sizes, an array each.
    Samples of three axes are a VAE's, with previews; others have none. `image` overrides fields of the image recipe,
    `lengths` the number of rows of each shard; those of several sizes are cut alike. `parts` has
    the number of shards of each part.
    With a `text` recipe, samples are texts of five tokens each. `extra` holds extra columns of the plan.
    With `clips`, samples are those of a causal video VAE, of 4 T - 3 frames at 16 fps; they have previews.
    """
    sizes = [latents] if isinstance(latents, np.ndarray) else [*latents]
    plan = make_plan(sum(map(len, sizes)), ids, conversations)
    states = [WITHDRAWN if row in withdrawn else PLANNED for row in range(len(plan))]
    plan = plan.set_column(plan.column_names.index("state"), PLAN_SCHEMA.field("state"), [states])
    starts = {CLIP_START: [0.5 * row for row in range(len(plan))]} if clips else {}
    for name, values in {**starts, **(extra or {})}.items():
        if name == CLIP_START:
            plan = plan.set_column(plan.column_names.index(name), PLAN_SCHEMA.field(name), pa.array(values))
        else:
            plan = plan.append_column(name, pa.array(values))
    channels = sizes[0].shape[1] if sizes[0].ndim == 4 or clips else 0
    encoder = make_encoder(batch_size, latents_mean or [0.0] * channels, latents_std or [1.0] * channels, posterior)
    arrays = [sized_array(each.shape[1:], text, clips) for each in sizes]
    names, frames = [each.size.name for each in arrays], sorted({each.size.frames for each in arrays})
    pairs = zip(sizes, names, strict=True)
    runs = tuple(run for each, name in pairs for run in schema.even_shards(len(each), samples_per_shard, name))
    if lengths:
        runs = tuple(schema.shard_runs([*lengths] * len(names), [name for name in names for _ in lengths]))
    ends = np.cumsum([0, *schema.shard_lengths(runs)])
    edges = np.cumsum([0, *(parts or [len(ends) - 1])])
    cut = [plan.slice(ends[first], ends[stop] - ends[first]) for first, stop in pairwise(edges)]
    spec = schema.Spec(
        format_version=1,
        store_format=store_format,
        samples_per_shard=samples_per_shard,
        parts=tuple(
            schema.Part(rows=len(each), shards=int(count), digest=samples_digest(each))
            for each, count in zip(cut, np.diff(edges), strict=True)
        ),
        shards=runs,
        array=make_array(sizes[0].shape[1:], dtype, codec, encoder, image, text, frames if clips else []),
        arrays=tuple(arrays),
    )
    shards = [plan.slice(rows.start, len(rows)) for rows in map(spec.shard_rows, range(spec.num_shards))]
    store = LocalStore(path)
    sized = [(shard, spec.names[array]) for shard, array in zip(shards, spec.array_indices, strict=True)]
    for number, (first, stop) in enumerate(pairwise(edges)):
        put_part(store, number, sized[first:stop])
    put_in_force(store, [put_texts(store, each, shards[slice(*edge)]) for each, edge in enumerate(pairwise(edges))])
    write_build(store, {})
    for name, data in metadata_of(spec):
        store.put_whole(name, data)
    outcomes = [outcome(row, row in rejected) for row in range(spec.rows)]
    if text:
        outcomes = [each if each.reason else each._replace(tokens=5) for each in outcomes]
    samples, random = [sample for each in sizes for sample in each], np.random.default_rng(0)
    for shard, planned in enumerate(shards):
        rows, array_spec = spec.shard_rows(shard), spec.array_of(shard)
        with ShardBuilder(store, spec, shard, planned) as builder:
            for first in range(rows.start, rows.stop, batch_size):
                batch = slice(first, min(first + batch_size, rows.stop))
                values = np.stack(samples[batch])
                rgb = None
                if array_spec.has_preview:
                    rgb = random.random((len(values), *array_spec.preview_cells, 3), np.float32)
                builder.append(values, rgb, outcomes[batch])
            if text and shard == 0:
                builder.add_null_text(np.zeros(array_spec.shape, np.float32))
            builder.commit(seconds=1.0, device="cpu", versions={})
    if seal:
        seal_cache(path, spec)
    return path


def seal_cache(path: Path, spec: schema.Spec) -> None:
    """Write the seal of a cache whose shards are all committed, from its files."""
    store = LocalStore(path)
    contents = [record.content for _, record in sorted(survey_records(store).records.items())]
    files = [file_record(store, part_file(part)) for part in range(len(spec.parts))]
    write_seal(store, sum_up(store, spec, contents, files), None)


def make_plan(count: int, ids: Sequence[str] | None, conversations: Sequence[Conversation] | None) -> pa.Table:
    ids = ids or [f"sample-{row:06d}" for row in range(count)]
    columns = {
        "id": ids,
        "uri": [f"{name}.png" for name in ids],
        "clip_start": [None] * count,
        "fingerprint": ["0:0"] * count,
        "place": [None] * count,
        "state": [PLANNED] * count,
        "size": [""] * count,
        "conversations": conversations or [caption(f"this is {name}") for name in ids],
    }
    return pa.table(columns, schema=pa.schema([*PLAN_SCHEMA, *TEXTS_SCHEMA]))


def make_encoder(
    batch_size: int, mean: Sequence[float], std: Sequence[float], posterior: str = "mean"
) -> array.EncoderIdentity:
    model: dict[str, Any] = {"class_name": "AutoencoderKLWan", "weights_sha256": "0" * 64, "path": "folded"}
    model |= {"compiled": False, "posterior": posterior, "compute_dtype": "float32", "batch_size": batch_size}
    return array.EncoderIdentity(**model, latents_mean=tuple(mean), latents_std=tuple(std))


def has_picture(shape: Sequence[int], clips: bool) -> bool:
    return len(shape) == 3 or clips


def sized_array(shape: tuple[int, ...], text: array.TextRecipe | None, clips: bool = False) -> schema.SizedArray:
    """Describe the array of samples of this shape, of images 8 times as large."""
    height, width = (8 * side for side in shape[-2:]) if has_picture(shape, clips) else (32, 40)
    size = array.Size(4 * shape[1] - 3 if clips else 1, height, width)
    return schema.SizedArray(size=array.Size(1, 1, text.max_tokens) if text else size, shape=shape)


def make_array(
    shape: tuple[int, ...],
    dtype: Any,
    codec: Any,
    encoder: array.EncoderIdentity,
    image: Mapping[str, Any] | None = None,
    text: array.TextRecipe | None = None,
    frames: Sequence[int] = (),
) -> array.ArrayRecipe:
    has_preview = has_picture(shape, bool(frames))
    _, height, width = sized_array(shape, None, bool(frames)).size
    recipe: dict[str, Any] = {"rule": array.SizeRule(preset="squash", sizes=((width, height),)), "range": "signed"}
    recipe |= {"resample": "bilinear", "max_pixels": 10**8, "decode": "full", "flip": False, **(image or {})}
    if frames:
        recipe["clip"] = array.ClipRecipe(counts=tuple(frames), fps=16.0)
    axes = CLIP_AXES if frames else AXES[len(shape)]
    return array.ArrayRecipe(
        axes=axes,
        feature_axis="channel" if has_preview else "feature",
        features=shape[axes.index("channel" if has_preview else "feature")],
        has_preview=has_preview,
        dtype=dtype,
        codec=codec,
        image=None if text else array.ImageRecipe(**recipe),
        text=text,
        encoder=encoder,
    )


def outcome(row: int, is_rejected: bool) -> Outcome:
    if is_rejected:
        return Outcome(content_sha256=None, width=None, height=None, reason="missing: no such file")
    placed = {"resized_width": 64, "resized_height": 48, "crop_left": row % 3, "crop_top": 0}
    return Outcome(content_sha256=f"{row:064x}", width=64, height=48, reason=None, **placed)
