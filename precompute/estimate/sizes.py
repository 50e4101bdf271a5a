"""How large a cache would be, by codec: its shards in bytes, of probed samples laid out as a build lays them out."""

import io
from dataclasses import dataclass
from typing import get_args

import msgspec
import numpy as np
import pyarrow as pa

from cache_store.format.codec import encode_sample
from cache_store.format.formats import FORMATS, shard_format
from cache_store.format.schema import CodecName, Spec

UNREAD = "0" * 64
"""In place of an image's digest, which is as long."""


@dataclass(frozen=True)
class CacheSize:
    """Of all shards of a cache, without its tables, which are small."""

    sample_bytes: float
    total: float


def sizes_by_codec(spec: Spec, planned: pa.Table, samples: np.ndarray) -> dict[CodecName, CacheSize]:
    """Of the cache of that spec with each codec that its form knows; `samples`, float32, are those of `planned`."""
    codecs = (
        name for name in get_args(CodecName) if not FORMATS[spec.store_format].unsupported(spec.array.dtype, name)
    )
    return {codec: measured(with_codec(spec, codec), planned, samples) for codec in codecs}


def with_codec(spec: Spec, codec: CodecName) -> Spec:
    return msgspec.structs.replace(spec, array=msgspec.structs.replace(spec.array, codec=codec))


def measured(spec: Spec, planned: pa.Table, samples: np.ndarray) -> CacheSize:
    stream, samples = io.BytesIO(), samples[: spec.samples_per_shard]
    writer = shard_format(spec).writer(stream, planned)
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(samples.astype(spec.array.numpy_dtype))
    for values in stored:
        writer.append(encode_sample(values, spec.array.codec), UNREAD)
    sample_bytes = stream.tell() / len(samples)
    writer.finish()
    end_bytes = stream.tell() - sample_bytes * len(samples)
    return CacheSize(sample_bytes, sample_bytes * spec.rows + end_bytes * spec.num_shards)
