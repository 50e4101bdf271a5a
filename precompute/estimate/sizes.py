"""Compute a cache's size by codec: lay out probed samples in memory as a build lays them out on disk."""

# Axes: N samples, H W latent cells, 3 RGB.

import hashlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, get_args

import msgspec
import numpy as np
import pyarrow as pa

from cache_store.cache.commit import write_rows
from cache_store.cache.writer import Outcome, encoded_rows, samples_table, scaled
from cache_store.format.array import ArraySpec, CodecName
from cache_store.format.formats import FORMATS, shard_format
from cache_store.format.plan import encode_plan
from cache_store.format.record import canonical_json
from cache_store.format.schema import SizedArray, Spec
from cache_store.format.sums import RunningSums


@dataclass(frozen=True)
class CacheSize:
    """The size of a whole cache in bytes, exact to a kilobyte or two per shard."""

    sample_bytes: float
    """Bytes of a sample in its shard's file."""
    total: float
    """Bytes of all files: shards, tables, plan and records."""
    write_per_s: float
    """Samples per second that a worker's writer takes, without the disk: sums, codec and digest."""

    def scaled(self, larger: float, rows: int) -> "CacheSize":
        """Return the size if samples are larger by this factor."""
        total = self.total + self.sample_bytes * (larger - 1) * rows
        return CacheSize(self.sample_bytes * larger, total, self.write_per_s / larger)


def sizes_by_codec(spec: Spec, array: ArraySpec, planned: pa.Table, samples: np.ndarray) -> dict[CodecName, CacheSize]:
    """Compute the cache's size with each codec that its format supports.

    `samples` (float32) are those of `planned`, in `array`; samples of other sizes are taken to compress as well.
    """
    larger = spec.sample_bytes / spec.rows / array.sample_bytes
    runs = tuple(msgspec.structs.replace(run, array=array.size.name) for run in spec.shards)
    spec = msgspec.structs.replace(spec, arrays=(SizedArray(size=array.size, shape=array.shape),), shards=runs)
    samples = samples[: spec.samples_per_shard]
    planned = planned.slice(0, len(samples))
    codecs = (
        name for name in get_args(CodecName) if not FORMATS[spec.store_format].unsupported(spec.array.dtype, name)
    )
    return {
        codec: measure_size(with_codec(spec, codec), planned, samples).scaled(larger, spec.rows) for codec in codecs
    }


def with_codec(spec: Spec, codec: CodecName) -> Spec:
    return msgspec.structs.replace(spec, array=msgspec.structs.replace(spec.array, codec=codec))


def measure_size(spec: Spec, planned: pa.Table, samples: np.ndarray) -> CacheSize:
    array, stream = spec.array_of(0), io.BytesIO()
    outcomes = [make_up_outcome(name, array) for name in planned["id"].to_pylist()]
    writer = shard_format(spec).writer(stream, 0, planned)
    sums, everyone = RunningSums(array), np.ones(len(samples), np.bool_)
    grey = np.full((len(samples), *array.preview_cells, 3), 1 / 3) if array.has_preview else None
    started = time.monotonic()
    rounded = sums.round_and_add(samples, everyone, grey)
    outcomes = scaled(outcomes, rounded)
    places = writer.append(encoded_rows(array, rounded, outcomes))
    hashlib.sha256(stream.getbuffer())
    write_per_s = len(samples) / (time.monotonic() - started)
    sample_bytes = stream.tell() / len(samples)
    writer.finish()
    end_bytes = stream.tell() - sample_bytes * len(samples)
    table_row, table_end = row_and_end(write_rows, samples_table(array, planned, outcomes, places))
    plan_row, plan_end = row_and_end(write_plan, planned)
    by_row, by_shard = sample_bytes + table_row + plan_row, end_bytes + table_end + record_bytes(spec, sums)
    return CacheSize(sample_bytes, by_row * spec.rows + by_shard * spec.num_shards + plan_end, write_per_s)


def make_up_outcome(sample_id: str, array: ArraySpec) -> Outcome:
    """Make up the outcome of an image or text whose digest and size compress as little as real ones."""
    digest = hashlib.sha256(sample_id.encode()).hexdigest()
    if array.text is not None:
        return Outcome(content_sha256=digest, tokens=int(digest[:3], 16))
    return Outcome(content_sha256=digest, width=int(digest[:3], 16), height=int(digest[3:6], 16), reason=None)


def row_and_end(write: Callable[[BinaryIO, pa.Table], None], table: pa.Table) -> tuple[float, float]:
    """Return the bytes per row of a table's file, and the bytes of the file without rows."""
    whole, end = (written_bytes(write, each) for each in (table, table.slice(0, 0)))
    return (whole - end) / table.num_rows, end


def write_plan(file: BinaryIO, planned: pa.Table) -> None:
    encode_plan(file, [planned] if planned.num_rows else [], ["1x1"])


def written_bytes(write: Callable[[BinaryIO, pa.Table], None], table: pa.Table) -> int:
    write(stream := io.BytesIO(), table)
    return stream.tell()


def record_bytes(spec: Spec, sums: RunningSums) -> int:
    """Compute the bytes of a commit record's recipe and statistics, which are nearly all of it."""
    return len(canonical_json([spec.recipe, sums.statistics(), sums.preview()]))
