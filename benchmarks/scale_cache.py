"""Simulated caches and sample lists of any size: records, tables and plan are real, shard files sparse and empty."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cache_store.cache.metadata import file_record, metadata_of, open_plan, write_build
from cache_store.format import schema
from cache_store.format.formats import files_of_shard
from cache_store.format.layout import COMMITS, PLAN_FILE, SAMPLES, SEAL_FILE, commit_file
from cache_store.format.plan import PlanDigests
from cache_store.format.record import canonical_json, sign
from cache_store.format.sums import to_tuples
from cache_store.format.tables import CACHED, SAMPLES_SCHEMA
from cache_store.storage.files import file_sha256
from cache_store.storage.local import LocalStore
from tests.make_cache import make_array, make_encoder

# Axes: C channels, H W latent cells.

PER_SHARD = 4_096
SHAPE_CHW = (16, 4, 4)
"""Small, since the figures do not depend on it: sparse files take no disk, but pages that are read take memory."""

ARRAY = make_array(SHAPE_CHW, "float16", "none", make_encoder(32, [0.0] * 16, [1.0] * 16))
RECIPE = schema.Recipe(format_version=1, store_format="zarr", samples_per_shard=PER_SHARD, array=ARRAY)
PAYLOAD = ARRAY.sample_bytes + 4
SHARD_BYTES = PER_SHARD * PAYLOAD + 16 * PER_SHARD + 4


def write_lines(path: Path, count: int) -> None:
    """Write JSON Lines in LLaVA's form, which all name one image beside them."""
    (path.parent / "a.jpg").write_bytes(b"\xff\xd8")
    turns = '[{"from": "human", "value": "<image>\\nDescribe it."}, {"from": "gpt", "value": "%s"}]'
    line = '{"id": "%09d", "image": "a.jpg", "conversations": ' + turns + "}\n"
    with path.open("w") as stream:
        stream.writelines(line % (number, text_of(number)) for number in range(count))


def write_parquet(path: Path, count: int) -> None:
    """Write rows of images, of two bytes each, with ids and captions."""
    kinds = pa.schema([("image", pa.binary()), ("id", pa.string()), ("caption", pa.string())])
    with pq.ParquetWriter(path, kinds, compression="zstd") as writer:
        for first in range(0, count, 65_536):
            numbers = range(first, min(first + 65_536, count))
            columns = [[b"\xff\xd8"] * len(numbers), [f"{each:09d}" for each in numbers], map(text_of, numbers)]
            writer.write_table(pa.table([pa.array(each) for each in columns], schema=kinds))


def text_of(number: int) -> str:
    """Return a caption of LLaVA-CC3M's usual length that differs from all others."""
    return f"a photograph of thing number {number}, taken from the left on a fine day"


def write_records(cache: Path, count: int) -> None:
    """Write everything but the seal, for the plan in the folder, or else with dummy plan digests."""
    store = LocalStore(cache)
    digests = open_plan(store).digests() if store.has(PLAN_FILE) else None
    spec = RECIPE.spec(count, digests.whole if digests else "0" * 64)
    for name, data in metadata_of(spec):
        store.put_whole(name, data)
    write_build(store, {}, listed_in(store, digests) if digests else None)
    for folder in (COMMITS, SAMPLES):
        (cache / folder).mkdir(exist_ok=True)
    planned = digests.shards if digests else ("0" * 64,) * spec.num_shards
    for shard, digest in enumerate(planned):
        write_shard(cache, spec, shard, digest)


def listed_in(store: LocalStore, plan: PlanDigests) -> schema.Listed:
    """Make the record that a build keeps of its source's list; the source itself is never read here."""
    sha256 = file_record(store, PLAN_FILE).sha256
    return schema.Listed(source="", plan_sha256=sha256, plan_digest=plan.whole, shard_digests=plan.shards)


def write_shard(cache: Path, spec: schema.Spec, shard: int, plan_digest: str) -> None:
    """Write without waiting for the disk; full shards share the samples table of the first."""
    names, rows = files_of_shard(spec, shard), spec.shard_rows(shard)
    shard_file, table_file = (cache / name for name in names)
    shard_file.parent.mkdir(parents=True)
    with shard_file.open("wb") as stream:
        stream.truncate(SHARD_BYTES)
    first = cache / files_of_shard(spec, 0)[1]
    if shard and len(rows) == PER_SHARD:
        os.link(first, table_file)
    else:
        pq.write_table(samples_table(rows), table_file, compression="zstd")
    content = content_of(spec, shard, plan_digest, dict(zip(names, (shard_file, table_file), strict=True)))
    run = schema.CommitRun(attempt=1, seconds=1.0, images_per_s=1.0, host="", device="cpu", versions={})
    record = sign(schema.CommitRecord(format_version=1, content=content, run=run, sha256=""))
    (cache / commit_file(shard)).write_bytes(canonical_json(record))


def samples_table(rows: range) -> pa.Table:
    """Make the samples table of a shard without rejected samples."""
    count = len(rows)
    columns = {
        "row": rows,
        "id": [f"{row:09d}" for row in rows],
        "status": [CACHED] * count,
        "reason": [None] * count,
        "content_sha256": [hashlib.sha256(b"%d" % row).hexdigest() for row in rows],
        "width": [640] * count,
        "height": [480] * count,
        "offset": range(0, count * PAYLOAD, PAYLOAD),
        "length": [ARRAY.sample_bytes] * count,
        "crc32c": np.random.default_rng(0).integers(2**32, size=count),
    }
    return pa.table(columns, schema=SAMPLES_SCHEMA)


def content_of(spec: schema.Spec, shard: int, plan_digest: str, files: dict[str, Path]) -> schema.CommitContent:
    """Make a record's content, as long as a real one."""
    count, rng = len(spec.shard_rows(shard)), np.random.default_rng(shard)
    sums = {name: tuple(rng.random(16).tolist()) for name in ("sum", "sum_of_squares", "minimum", "maximum")}
    cells = rng.random((64, 17))
    gram, moment = cells.T @ cells, rng.random((17, 3))
    return schema.CommitContent(
        shard=shard,
        recipe=spec.recipe,
        plan_digest=plan_digest,
        files=tuple(
            schema.FileRecord(path=name, bytes=path.stat().st_size, sha256=sha256_of(path))
            for name, path in files.items()
        ),
        rows_digest="0" * 64,
        cached=count,
        rejected=0,
        reasons={},
        non_finite=0,
        statistics=schema.FeatureStatistics(count=count * 16, **sums),
        preview=schema.PreviewEquations(gram=to_tuples(gram), moment=to_tuples(moment)),
    )


def sha256_of(path: Path) -> str:
    """Hash a samples table; a shard file gets a dummy digest, which is never checked here."""
    return file_sha256(path) if path.suffix else "0" * 64


def drop_half(cache: Path) -> None:
    """Delete the seal and half of the records, as if the build had been killed halfway."""
    (cache / SEAL_FILE).unlink()
    records = sorted((cache / COMMITS).iterdir())
    for record in records[len(records) // 2 :]:
        record.unlink()
