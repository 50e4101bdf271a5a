"""Convert one shard: each sample is checked when it is read and again after it is written.

The new record is the source's with other files: samples, statistics and run are the same.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import numpy as np
import pyarrow as pa

from cache_store.cache.commit import ShardFiles
from cache_store.cache.metadata import open_plan, read_samples
from cache_store.errors import CacheError
from cache_store.format.array import ArraySpec, CodecName
from cache_store.format.codec import crc32c, decode_sample, encode_sample
from cache_store.format.formats import shard_format
from cache_store.format.layout import EncodedRows, Location, ShardSamples
from cache_store.format.record import sign
from cache_store.format.schema import CommitRecord, Spec
from cache_store.format.tables import TOKENS, samples_schema
from cache_store.storage.store import Store
from cache_store.verify.record import file_finding

REPORTED_EVERY = 256
"""Samples between two reports of progress."""


@dataclass(frozen=True)
class CacheAt:
    """A cache to read or write: its store and its spec."""

    store: Store
    spec: Spec


class ShardConverter:
    """Converts shards of `source` into shards of `target`; their specs differ only in format and codec."""

    def __init__(self, source: CacheAt, target: CacheAt, progress: Callable[[int], object]) -> None:
        self._source, self._target, self._progress = source, target, progress
        self._plan = open_plan(source.store)
        self._recoded = Recoder(source.spec.array, target.spec.array.codec)

    def convert(self, record: CommitRecord) -> CommitRecord:
        """Convert a shard and return its new record; CacheError if the source does not match `record`."""
        target, shard = self._target, record.content.shard
        samples = self._read_samples(record)
        with ShardFiles(target.store, target.spec, shard) as files:
            with files.writing() as stream:
                locations = self._copy(samples, stream)
            table = relocate_samples(samples.table, locations)
            self._read_back(files.read_back(), ShardSamples(target.spec, shard, table, samples.planned))
            written = files.finish(table, self._null_text(record))
            content = msgspec.structs.replace(record.content, recipe=target.spec.recipe, files=written)
            converted = sign(msgspec.structs.replace(record, content=content))
            files.commit(converted)
        return converted

    def _read_samples(self, record: CommitRecord) -> ShardSamples:
        """Read the shard's samples table after checking its digest: its checksums then verify the latents."""
        shard, file = record.content.shard, record.content.files[1]
        if finding := file_finding(self._source.store, file, shard):
            raise self._damaged(str(finding))
        table = read_samples(self._source.store, shard)
        if table.schema != samples_schema(self._source.spec.array):
            raise self._damaged(f"{file.path} does not have the columns of the format")
        return ShardSamples(self._source.spec, shard, table, self._plan.recorded_rows(record.content))

    def _null_text(self, record: CommitRecord) -> bytes | None:
        """Read the null prompt's sample, if the shard has it, after checking its digest."""
        for file in record.content.files[2:]:
            if finding := file_finding(self._source.store, file, record.content.shard):
                raise self._damaged(str(finding))
            return self._source.store.read(file.path)
        return None

    def _copy(self, samples: ShardSamples, stream: BinaryIO) -> list[Location | None]:
        """Check every sample and write it to the new shard file; return the new places."""
        source, target, shard, found = self._source, self._target, samples.shard, samples.locations
        file = shard_format(source.spec).shard_file(shard)
        writer = shard_format(target.spec).writer(stream, samples.shard, samples.planned)
        contents = samples.table["content_sha256"].to_pylist()
        tokens = samples.table[TOKENS].to_pylist() if source.spec.array.text else [None] * len(contents)
        locations = list[Location | None]()
        data = source.store.map(file)
        for slot, (location, content, count) in enumerate(zip(found, contents, tokens, strict=True)):
            if location is None:
                writer.append(encoded_row(None, content, count))
                locations.append(None)
            else:
                payload = data[location.offset : location.offset + location.length]
                if crc32c(payload) != location.crc32c:
                    row = samples.rows.start + slot
                    raise self._damaged(f"row {row} in shard {shard} ({file}) does not match its crc32c")
                (place,) = writer.append(encoded_row(self._recoded(payload), content, count)).tolist()
                locations.append(Location(*place))
            if (slot + 1) % REPORTED_EVERY == 0:
                self._progress(REPORTED_EVERY)
        self._progress(len(found) % REPORTED_EVERY)
        writer.finish()
        return locations

    def _read_back(self, data: memoryview, samples: ShardSamples) -> None:
        """Raise CacheError if the file does not read back as it was written."""
        path = self._target.store.where(shard_format(samples.spec).shard_file(samples.shard))
        for location in samples.locations:
            if location is not None:
                offset, length, checksum = location
                if crc32c(data[offset : offset + length]) != checksum:
                    raise CacheError(f"{path} does not read back as it was written; is the disk failing?")
        for _, problem in shard_format(samples.spec).structure_problems(data, samples):
            raise CacheError(f"{path} does not read back as it was written: {problem}; is the disk failing?")

    def _damaged(self, problem: str) -> CacheError:
        root = str(self._source.store)
        return CacheError(f"{root} is damaged: {problem}; run `cache-store verify {shlex.quote(root)} --level full`")


def encoded_row(payload: bytes | memoryview | None, content: str | None, tokens: int | None) -> EncodedRows:
    """Make one row of a shard; without a payload, it is absent."""
    payloads = [] if payload is None else [payload]
    checksums = np.array([*map(crc32c, payloads)], np.uint32)
    return EncodedRows(
        kept=np.array([payload is not None]),
        payloads=payloads,
        checksums=checksums,
        contents=[content],
        tokens=[tokens],
    )


class Recoder:
    """Recodes samples from one codec to another; every result is decoded again and compared."""

    def __init__(self, array: ArraySpec, target_codec: CodecName) -> None:
        self._source_codec, self._target_codec = array.codec, target_codec
        self._values, self._again = (np.empty(array.sample_bytes, np.uint8) for _ in range(2))
        self._integer = f"<u{array.numpy_dtype.itemsize}"

    def __call__(self, payload: memoryview) -> memoryview | bytes:
        if self._source_codec == self._target_codec:
            return payload
        decode_sample(payload, self._source_codec, self._values)
        encoded = encode_sample(self._values.view(self._integer), self._target_codec)
        decode_sample(memoryview(encoded), self._target_codec, self._again)
        assert np.array_equal(self._values, self._again), self._target_codec
        return encoded


def relocate_samples(samples: pa.Table, locations: list[Location | None]) -> pa.Table:
    """Return the samples table with the new places of its latents."""
    for name in Location._fields:
        values = [location and getattr(location, name) for location in locations]
        place = samples.schema.get_field_index(name)
        field = samples.schema.field(place)
        samples = samples.set_column(place, field, pa.array(values, field.type))
    return samples
