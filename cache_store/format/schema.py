"""The records of a cache: spec, commit records, build record and seal, all strict and frozen.

docs/format.md says what each field is.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_store.format.array import ArrayRecipe, ArraySpec, Count, Side, Size
from cache_store.format.layout import texts_file
from cache_store.format.record import Record

StoreFormat = Literal["zarr", "webdataset"]

MAX_SHARDS = 10**6
"""Shard files are numbered with six digits, and programs may list them all."""
MAX_SAMPLES_PER_SHARD = 2**20
"""A shard's index is held in memory: 16 bytes per sample."""

Moment = Annotated[float, msgspec.Meta(ge=-1e100, le=1e100)]
"""A statistic; sums and squares of float32 latents stay far below these bounds, which exclude overflow."""


class Recipe(Record, frozen=True, kw_only=True):
    """The settings that all shards share: the spec without its samples and sizes, so that a cache can grow.

    Every commit record and the seal contain it in full, so that a lost spec can be restored from them.
    """

    format_version: int
    store_format: StoreFormat
    samples_per_shard: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES_PER_SHARD)]
    array: ArrayRecipe

    def spec(self, parts: Iterable["Part"], shards: Iterable["ShardRun"], arrays: Iterable["SizedArray"]) -> "Spec":
        recipe = {name: getattr(self, name) for name in Recipe.__struct_fields__}
        return Spec(**recipe, parts=tuple(parts), shards=tuple(shards), arrays=tuple(arrays))


class Part(Record, frozen=True, kw_only=True):
    """Samples that were planned together: a file of the plan."""

    rows: Annotated[int, msgspec.Meta(ge=1)]
    shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)]
    digest: str


class ShardRun(Record, frozen=True, kw_only=True):
    """Consecutive shards of one length in one array."""

    shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)]
    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES_PER_SHARD)]
    array: str


class SizedArray(Record, frozen=True, kw_only=True):
    """An array of the cache: all samples of one size."""

    size: Size
    shape: tuple[Side, ...]


class Spec(Recipe, frozen=True, kw_only=True):
    """The cache's contract with its readers; two caches with equal digests are interchangeable."""

    max_bytes: ClassVar[int] = 128 * 2**20
    """A million shards that all differ in length from their neighbours take 60 MB."""

    parts: Annotated[tuple[Part, ...], msgspec.Meta(min_length=1)]
    shards: Annotated[tuple[ShardRun, ...], msgspec.Meta(min_length=1)]
    arrays: Annotated[tuple[SizedArray, ...], msgspec.Meta(min_length=1)]

    @property
    def recipe(self) -> Recipe:
        return Recipe(**{name: getattr(self, name) for name in Recipe.__struct_fields__})

    @cached_property
    def samples_digest(self) -> str:
        """SHA-256 over the digests of the parts: caches with equal ones join, whatever their shards."""
        return hashlib.sha256("".join(part.digest for part in self.parts).encode()).hexdigest()

    @cached_property
    def part_shards(self) -> tuple[range, ...]:
        ends = [*accumulate(part.shards for part in self.parts)]
        return tuple(range(end - part.shards, end) for end, part in zip(ends, self.parts, strict=True))

    @cached_property
    def part_of_shard(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.parts)), [part.shards for part in self.parts])

    @cached_property
    def rows(self) -> int:
        return sum(run.shards * run.rows for run in self.shards)

    @cached_property
    def num_shards(self) -> int:
        return sum(run.shards for run in self.shards)

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """First row of each shard, then the number of rows: [shards + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(shard_lengths(self.shards))])

    def shard_rows(self, shard: int) -> range:
        return range(int(self.bounds[shard]), int(self.bounds[shard + 1]))

    def shard_of_row(self, row: int) -> int:
        return int(np.searchsorted(self.bounds, row, side="right")) - 1

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(each.size.name for each in self.arrays)

    @cached_property
    def array_indices(self) -> NDArray[np.int64]:
        """Index in `arrays` of each shard's array: [shards]."""
        places = {name: index for index, name in enumerate(self.names)}
        return np.repeat([places[run.array] for run in self.shards], [run.shards for run in self.shards])

    @cached_property
    def places_in_arrays(self) -> NDArray[np.int64]:
        """Number of shards that precede each shard in its array: [shards]."""
        places = np.empty(self.num_shards, np.int64)
        for array in range(len(self.arrays)):
            mine = self.array_indices == array
            places[mine] = np.arange(np.count_nonzero(mine))
        return places

    @cached_property
    def sized_arrays(self) -> tuple[ArraySpec, ...]:
        return tuple(self.array.of_size(each.size, each.shape) for each in self.arrays)

    @property
    def sample_bytes(self) -> int:
        """Bytes of the decoded samples of all rows."""
        each = np.array([array.sample_bytes for array in self.sized_arrays])[self.array_indices]
        return int((each * np.diff(self.bounds)).sum())

    def array_of(self, shard: int) -> ArraySpec:
        return self.sized_arrays[int(self.array_indices[shard])]


def shard_lengths(runs: Sequence[ShardRun]) -> NDArray[np.int64]:
    return np.repeat(np.array([run.rows for run in runs], np.int64), [run.shards for run in runs])


def shard_runs(lengths: Iterable[int], arrays: Iterable[str]) -> Iterator[ShardRun]:
    each = zip(lengths, arrays, strict=True)
    return joined_runs(ShardRun(shards=1, rows=rows, array=array) for rows, array in each)


def joined_runs(runs: Iterable[ShardRun]) -> Iterator[ShardRun]:
    for (rows, array), equal in groupby(runs, lambda run: (run.rows, run.array)):
        yield ShardRun(shards=sum(run.shards for run in equal), rows=rows, array=array)


def even_shards(rows: int, samples_per_shard: int, array: str) -> tuple[ShardRun, ...]:
    """Cut rows of an array into full shards, and a shorter last one if any are left."""
    full, rest = divmod(rows, samples_per_shard)
    lengths = [samples_per_shard] * full + [rest] * bool(rest)
    return tuple(shard_runs(lengths, [array] * len(lengths)))


def require_lengths(length: int, *lists: Sized) -> None:
    """Raise ValueError, which msgspec reports as a fault of the record, unless every list has this length."""
    if length < 1 or any(len(each) != length for each in lists):
        raise ValueError("its lists differ in length, or are empty")


class FileRecord(Record, frozen=True, kw_only=True):
    path: str
    bytes: Count
    sha256: str

    def __post_init__(self) -> None:
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts or "\0" in self.path or not path.parts:
            raise ValueError(f"{self.path!r} is not a path inside a cache")


class CommitContent(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The contents of a shard; equal inputs give equal contents."""

    shard: Count
    first_row: Count
    array: str
    recipe: Recipe
    samples: str
    texts: str | None = None
    """SHA-256 over the ids and texts that were encoded, in a cache of texts; a change of other texts is none of it."""
    files: Annotated[tuple[FileRecord, ...], msgspec.Meta(min_length=1)]
    rows_digest: str
    cached: Count
    rejected: Count
    withdrawn: Count = 0
    reasons: dict[str, Count]
    non_finite: Count
    remarks: dict[str, Count] = msgspec.field(default_factory=dict)
    cut_texts: Count = 0
    sums: str | None
    proof: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    """CRC32C over bytes of the shard file that no other shard has, by which a reader that maps the file knows it."""


class CommitRun(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The circumstances of a shard's build, such as times and hosts; they enter no digest but the record's own."""

    attempt: Count
    seconds: float
    images_per_s: float
    host: str
    device: str
    versions: dict[str, str]
    hardware: dict[str, str] = msgspec.field(default_factory=dict)
    committed_at: str = ""

    @property
    def made_by(self) -> str:
        """Hardware and libraries: `NVIDIA H100, cuda 12.8, cudnn 9.10.2, driver 570.86.15, diffusers 0.38, ...`."""
        first = [value for name, value in self.hardware.items() if name in ("gpu", "cpu")]
        others = [(name, value) for name, value in sorted(self.hardware.items()) if name not in ("gpu", "cpu")]
        return ", ".join([*first, *(" ".join(each) for each in (*others, *sorted(self.versions.items())))])


class CommitRecord(Record, frozen=True, kw_only=True):
    format_version: int
    content: CommitContent
    run: CommitRun
    sha256: str


class PartTexts(Record, frozen=True, kw_only=True):
    """The texts of a part that are in force."""

    digest: str
    bytes: Count
    sha256: str

    def file(self, part: int) -> FileRecord:
        return FileRecord(path=texts_file(part, self.digest), bytes=self.bytes, sha256=self.sha256)


class Texts(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Which texts are in force; no digest of a sample or of the cache includes them."""

    max_bytes: ClassVar[int] = 128 * 2**20

    format_version: int
    parts: Annotated[tuple[PartTexts, ...], msgspec.Meta(min_length=1)]
    before: tuple[PartTexts, ...] = ()
    extra: dict[str, str] = msgspec.field(default_factory=dict)
    sha256: str

    @property
    def files(self) -> list[str]:
        return [each.file(part).path for parts in (self.parts, self.before) for part, each in enumerate(parts)]

    @cached_property
    def texts_digest(self) -> str:
        """SHA-256 over the digests of the parts."""
        return hashlib.sha256("".join(part.digest for part in self.parts).encode()).hexdigest()


class Listed(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The source's version when it was listed, and the plan made of it; with both unchanged, no build lists it."""

    source: str | None
    """Digest over names, sizes, times and ETags of the source's files; None if every build must list the source."""
    plan: tuple[str, ...]
    parts: tuple[str | None, ...] = ()
    """Version of the files of each part, None if every build must list it; the record omits it unless all parts have
    files of their own."""


class BuildRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The configuration that the cache was built with: sources, encoder and recipe. It enters no digest."""

    max_bytes: ClassVar[int] = 128 * 2**20
    """Millions of ids that are being withdrawn fit."""

    format_version: int
    config: dict[str, Any]
    spec_digest: str = ""
    listed: Listed | None = None
    withdrawing: tuple[str, ...] = ()
    sha256: str


class PreviewMap(Record, frozen=True, kw_only=True):
    """RGB in [0, 1] = weight · features of a cell + bias: a picture without a decoder."""

    weight: tuple[tuple[Moment, ...], ...]
    bias: tuple[Moment, ...]

    def __post_init__(self) -> None:
        require_lengths(3, self.weight, self.bias)


class ArraySummary(Record, frozen=True, kw_only=True):
    """The array over the whole cache; lists have one entry per feature."""

    bytes: Count
    mean: tuple[Moment, ...]
    std: tuple[Moment, ...]
    minimum: tuple[Moment, ...]
    maximum: tuple[Moment, ...]
    preview: PreviewMap | None

    def __post_init__(self) -> None:
        weight = self.preview.weight if self.preview else ()
        require_lengths(len(self.mean), self.std, self.minimum, self.maximum, *weight)


class Seal(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The summary of a complete cache; it holds no times, so that equal inputs give an equal seal."""

    max_bytes: ClassVar[int] = 256 * 2**20
    """Twice the spec's, which it holds whole."""

    format_version: int
    spec: Spec
    cached: Count
    rejected: Count
    withdrawn: Count = 0
    reasons: dict[str, Count]
    remarks: dict[str, Count] = msgspec.field(default_factory=dict)
    cut_texts: Count = 0
    plan_files: tuple[FileRecord, ...]
    rejected_file: FileRecord
    shards_file: FileRecord
    array: ArraySummary
    sha256: str

    @property
    def identity(self) -> str:
        """The cache identity: SHA-256 of shards.bin, which has the digest of every record's content."""
        return self.shards_file.sha256
