"""Copy a shard into another form or codec: each sample is checked when it is read and again after it is written.

The new record is the source's with other files: samples, statistics and run are the same. Memory is needed for one
samples table only.
"""

import shlex
from collections.abc import Mapping
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from cache_store.cache.commit import ShardFiles
from cache_store.cache.metadata import open_plan, read_samples
from cache_store.cache.survey import ShardOnDisk
from cache_store.errors import CacheError
from cache_store.format.array import ArraySpec, CodecName
from cache_store.format.codec import crc32c, decode_sample, encode_sample
from cache_store.format.formats import shard_format
from cache_store.format.layout import SEAL_FILE
from cache_store.format.record import sign
from cache_store.format.schema import CommitRecord, Spec
from cache_store.format.shards import EncodedRows, Location, ShardSamples
from cache_store.format.tables import TOKENS, samples_schema
from cache_store.storage.store import Store
from cache_store.verify.record import file_finding, usable_record


class CacheAt(NamedTuple):
    """A cache to read or write."""

    store: Store
    spec: Spec


class NewForm:
    """Copies shards of `source` into `target`; their specs differ only in form and codec.

    `there` has the shards that the target holds already. It copies one shard at a time.
    """

    def __init__(self, source: CacheAt, target: CacheAt, there: Mapping[int, ShardOnDisk]) -> None:
        self._source, self._target, self._there = source, target, there
        self._plan = open_plan(source.store)

    def __call__(self, record: CommitRecord) -> tuple[CommitRecord, bool]:
        """Copy a shard unless it is there, undamaged; CacheError if the source does not match `record`."""
        (store, spec), shard = self._target, record.content.shard
        if shard in self._there:
            held, problem = usable_record(spec, shard, self._there[shard])
            if held and not problem:
                return held, False
        samples, null_text = self._read_samples(record), self._null_text(record)
        store.delete(SEAL_FILE)
        with ShardFiles(store, spec, shard) as files:
            with files.writing() as stream:
                locations = self._write(samples, stream)
            table = relocate_samples(samples.table, locations)
            self._read_back(files.read_back(), ShardSamples(spec, shard, table, samples.planned))
            content = msgspec.structs.replace(record.content, recipe=spec.recipe, files=files.finish(table, null_text))
            return files.commit(sign(msgspec.structs.replace(record, content=content))), True

    def _read_samples(self, record: CommitRecord) -> ShardSamples:
        """Read the shard's samples table after checking its digest: its checksums then verify the samples."""
        (store, spec), shard, file = self._source, record.content.shard, record.content.files[1]
        if finding := file_finding(store, file, shard):
            raise self._damaged(str(finding))
        table = read_samples(store, shard)
        if table.schema != samples_schema(spec.array):
            raise self._damaged(f"{file.path} does not have the columns of the format")
        return ShardSamples(spec, shard, table, self._plan.recorded_rows(record.content))

    def _null_text(self, record: CommitRecord) -> bytes | None:
        """Read the null prompt's sample, if the shard has it, after checking its digest."""
        for file in record.content.files[2:]:
            if finding := file_finding(self._source.store, file, record.content.shard):
                raise self._damaged(str(finding))
            return self._source.store.read(file.path)
        return None

    def _write(self, samples: ShardSamples, stream: BinaryIO) -> list[Location | None]:
        """Check every sample and write it to the new shard file; return the new places."""
        (store, spec), shard = self._source, samples.shard
        file = shard_format(spec).shard_file(shard)
        writer = shard_format(self._target.spec).writer(stream, shard, samples.planned)
        contents, tokens = (samples.table[name].to_pylist() for name in ("content_sha256", TOKENS))
        recode = Recoder(samples.array, self._target.spec.array.codec)
        places, data = list[Location | None](), store.map(file)
        for row, location, content, count in zip(samples.rows, samples.locations, contents, tokens, strict=True):
            payloads = list[bytes | memoryview]()
            if location is not None:
                payload = data[location.offset : location.offset + location.length]
                if crc32c(payload) != location.crc32c:
                    raise self._damaged(f"row {row} in shard {shard} ({file}) does not match its crc32c")
                payloads.append(recode(payload))
            (place,) = writer.append(encoded_row(payloads, content, count)).tolist()
            places.append(Location(*place) if payloads else None)
        writer.finish()
        return places

    def _read_back(self, data: memoryview, samples: ShardSamples) -> None:
        """Raise CacheError if the file does not read back as it was written."""
        form = shard_format(samples.spec)
        path = self._target.store.where(form.shard_file(samples.shard))
        for location in filter(None, samples.locations):
            if crc32c(data[location.offset : location.offset + location.length]) != location.crc32c:
                raise CacheError(f"{path} does not read back as it was written; is the disk failing?")
        for _, problem in form.structure_problems(data, samples):
            raise CacheError(f"{path} does not read back as it was written: {problem}; is the disk failing?")

    def _damaged(self, problem: str) -> CacheError:
        root = str(self._source.store)
        return CacheError(f"{root} is damaged: {problem}; run `cache-store verify {shlex.quote(root)} --level full`")


def encoded_row(payloads: list[bytes | memoryview], content: str | None, tokens: int | None) -> EncodedRows:
    """Make one row of a shard; without a payload, it is absent."""
    return EncodedRows(
        kept=np.array([bool(payloads)]),
        payloads=payloads,
        checksums=np.array([*map(crc32c, payloads)], np.uint32),
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
    """Return the samples table with the new places of its samples."""
    for name in Location._fields:
        values = [location and getattr(location, name) for location in locations]
        place = samples.schema.get_field_index(name)
        field = samples.schema.field(place)
        samples = samples.set_column(place, field, pa.array(values, field.type))
    return samples
