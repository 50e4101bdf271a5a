"""What a cache says about itself: the spec, the commit records and the seal, as strict frozen records.

Records are JSON on disk in one canonical form (sorted keys, fixed layout), so that equal records are equal bytes
and a digest over a record is a digest over its meaning. msgspec parses them: an unknown field, a missing field or
a wrong type is an error with the field's path, never a guess.
"""

import hashlib
import math
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import ml_dtypes
import msgspec
import numpy as np
import pyarrow as pa

from cache_store.errors import CacheError

FORMAT_VERSION = 1

SPEC_FILE = "zarr.json"
SPEC_ATTRIBUTE = "encode_once"
PLAN_FILE = "plan.parquet"
SEAL_FILE = "seal.json"
BUILD_FILE = "build.json"
COMMITS = "commits"

StoreFormat = Literal["zarr", "webdataset"]
StoreDtype = Literal["float16", "bfloat16", "float32"]
CodecName = Literal["none", "lz4", "zstd"]

DTYPES: dict[str, np.dtype] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("<f4"),
}

CACHED, REJECTED = "cached", "rejected"

CONVERSATIONS = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))

PLAN_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("id", pa.string()),
        ("uri", pa.string()),
        ("conversations", CONVERSATIONS),
        ("fingerprint", pa.string()),
    ]
)
"""`fingerprint` is what the source knows of an image without reading it (a zip's crc, a file's size and time)."""

SAMPLES_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("id", pa.string()),
        ("uri", pa.string()),
        ("content_sha256", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("conversations", CONVERSATIONS),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("crc32c", pa.uint32()),
    ]
)
"""`offset` and `length` delimit the encoded latent in its shard file; `crc32c` is over those bytes."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A record that is JSON on disk."""


RecordT = TypeVar("RecordT", bound=Record)


class ImageRecipe(Record, frozen=True, kw_only=True):
    """How an image becomes pixels; everything here changes latents."""

    height: int
    width: int
    fit: str
    resample: str
    range: str
    max_pixels: int
    orientation: str = "exif applied"
    alpha: str = "on white"
    colour: str = "rgb, profiles ignored"


class EncoderIdentity(Record, frozen=True, kw_only=True):
    """What must be equal for two encoders to give equal latents; `weights_sha256` covers config and weights."""

    class_name: str
    weights_sha256: str
    path: Literal["folded", "native"]
    compiled: bool
    posterior: str
    compute_dtype: str
    batch_size: int
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]


class ArraySpec(Record, frozen=True, kw_only=True):
    """One array of the cache: what a row holds and how it was made."""

    shape: tuple[int, int, int]
    """Of one sample: channels, latent_y, latent_x."""
    dtype: StoreDtype
    codec: CodecName
    image: ImageRecipe
    encoder: EncoderIdentity

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one decoded sample."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize


class Spec(Record, frozen=True, kw_only=True):
    """The cache's contract with its readers; two caches with equal digests are interchangeable."""

    format_version: int
    store_format: StoreFormat
    rows: int
    samples_per_shard: int
    plan_digest: str
    arrays: dict[str, ArraySpec]

    @property
    def digest(self) -> str:
        return record_digest(self)

    @property
    def recipe_digest(self) -> str:
        """Of all that is common to every shard: the spec without its sample list, so that a cache can grow.

        A commit record binds its own samples itself.
        """
        return record_digest(msgspec.structs.replace(self, rows=0, plan_digest=""))

    @property
    def num_shards(self) -> int:
        return -(-self.rows // self.samples_per_shard)

    def shard_rows(self, shard: int) -> range:
        """The rows of a shard; the last shard may be short."""
        first = shard * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.rows))


class FileRecord(Record, frozen=True, kw_only=True):
    path: str
    """Relative to the cache's folder."""
    bytes: int
    sha256: str


class ChannelStatistics(Record, frozen=True, kw_only=True):
    """Sums over every stored value of the cached samples, per channel, in float64."""

    count: int
    """Values per channel."""
    sum: tuple[float, ...]
    sum_of_squares: tuple[float, ...]
    minimum: tuple[float, ...]
    maximum: tuple[float, ...]


class PreviewEquations(Record, frozen=True, kw_only=True):
    """Normal equations of the least-squares map from [latent channels, 1] to RGB in [0, 1]."""

    gram: tuple[tuple[float, ...], ...]
    moment: tuple[tuple[float, ...], ...]


class CommitContent(Record, frozen=True, kw_only=True):
    """What a shard holds; equal inputs give equal contents."""

    array: str
    shard: int
    recipe_digest: str
    plan_digest: str
    """Of the shard's own planned rows, so that a shard of another cache shows."""
    files: tuple[FileRecord, ...]
    rows_digest: str
    """SHA-256 over (row, id, content_sha256) of every planned sample, so that a swapped or renumbered shard shows."""
    cached: int
    rejected: int
    reasons: dict[str, int]
    """Rejected samples by kind of reason (what stands before the colon)."""
    non_finite: int
    """Non-finite values the encoder gave; their samples are rejected."""
    statistics: ChannelStatistics | None
    """None where no sample of the shard was cached."""
    preview: PreviewEquations | None


class CommitRun(Record, frozen=True, kw_only=True):
    """How the shard came to be: clocks and hosts, outside every digest but the record's own."""

    attempt: int
    seconds: float
    images_per_s: float
    host: str
    device: str
    versions: dict[str, str]


class CommitRecord(Record, frozen=True, kw_only=True):
    format_version: int
    content: CommitContent
    run: CommitRun
    sha256: str
    """Over the record's canonical form without this field."""


class BuildRecord(Record, frozen=True, kw_only=True):
    """What the cache was built from: sources, encoder and recipe as they were configured; enters no digest."""

    format_version: int
    config: dict[str, Any]
    sha256: str
    """Over the record's canonical form without this field."""


class ArraySummary(Record, frozen=True, kw_only=True):
    """An array over the whole cache."""

    bytes: int
    channel_mean: tuple[float, ...]
    channel_std: tuple[float, ...]
    minimum: tuple[float, ...]
    maximum: tuple[float, ...]
    rgb_weight: tuple[tuple[float, ...], ...]
    """[3, channels]: RGB in [0, 1] = weight · latent + bias, a preview without a decoder."""
    rgb_bias: tuple[float, ...]


class Seal(Record, frozen=True, kw_only=True):
    """The whole cache's roll-up; holds no clock, so equal inputs give an equal seal."""

    format_version: int
    spec_digest: str
    identity: str
    """SHA-256 over the contents of all commit records, in order: the cache identity."""
    planned: int
    cached: int
    rejected: int
    reasons: dict[str, int]
    cached_per_shard: tuple[int, ...]
    commits: dict[str, tuple[str, ...]]
    """SHA-256 of every commit record's content, by array, shards in order, so that an edited one is named."""
    plan_file: FileRecord
    arrays: dict[str, ArraySummary]
    sha256: str
    """Over the seal's canonical form without this field."""


def samples_file(shard: int) -> str:
    return f"samples/{shard:06d}.parquet"


def commit_file(array: str, shard: int) -> str:
    return f"{COMMITS}/{array}/{shard:06d}.json"


def canonical_json(value: object) -> bytes:
    """The one form in which records rest on disk and enter digests."""
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=1) + b"\n"


def record_digest(*records: Record) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(canonical_json(record))
    return digest.hexdigest()


def parse_record(record_class: type[RecordT], data: bytes, where: str) -> RecordT:
    """Parse strictly; `where` names the file in the error."""
    try:
        return msgspec.json.decode(data, type=record_class, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CacheError(f"{where} is not a valid {record_class.__name__}: {error}") from None


def signed(record: RecordT) -> RecordT:
    """The record with its `sha256` filled in over everything else."""
    return msgspec.structs.replace(record, sha256=record_digest(msgspec.structs.replace(record, sha256="")))


def parse_signed(record_class: type[RecordT], data: bytes, where: str) -> RecordT:
    """Parse a signed record whose bytes are exactly what was written: no bit may differ."""
    record = parse_record(record_class, data, where)
    version = getattr(record, "format_version")  # noqa: B009 (signed records have one)
    if version != FORMAT_VERSION:
        raise CacheError(f"{where} has format version {version}; this program reads version {FORMAT_VERSION}")
    if canonical_json(signed(record)) != data:
        raise CacheError(f"{where} does not match its own sha256: it was edited or damaged")
    return record


def rows_digest(rows: Iterable[int], ids: Iterable[str], contents: Iterable[str | None]) -> str:
    """SHA-256 over (row, id, content_sha256), one JSON line a sample."""
    lines = msgspec.json.Encoder().encode_lines(zip(rows, ids, contents, strict=True))
    return hashlib.sha256(lines).hexdigest()
