"""The records of a cache: spec, commit records, build record and seal, all strict and frozen."""

import math
from collections.abc import Sized
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

import ml_dtypes
import msgspec
import numpy as np

from cache_store.format.record import Record

ROW_AXIS = "row"
"""Name of the array's first axis; a sample's own axes must have other names."""

StoreFormat = Literal["zarr", "webdataset"]
StoreDtype = Literal["float16", "bfloat16", "float32"]
CodecName = Literal["none", "lz4", "zstd"]

DTYPES: dict[str, np.dtype] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("<f4"),
}

MAX_SHARDS = 10**6
"""Shard files are numbered with six digits, and programs may list them all."""
MAX_SAMPLES_PER_SHARD = 2**20
"""A shard's index is held in memory: 16 bytes per sample."""
MAX_AXES = 4
MAX_SIDE = 2**16
MAX_SAMPLE_BYTES = 2**30
MAX_PREVIEW_FEATURES = 2**10
"""Most features of an array with a preview: a commit record has the square of that many numbers."""

MAX_COUNT = 2**53 - 1
"""The largest integer of canonical JSON (RFC 8785)."""

PLAIN_TEMPLATE = "{}"
"""The template that adds nothing to the text."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Side = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIDE)]
Axis = Annotated[str, msgspec.Meta(pattern=r"\A[a-z][a-z0-9_]{0,31}\Z")]
Moment = Annotated[float, msgspec.Meta(ge=-1e100, le=1e100)]
"""A statistic; sums and squares of float32 latents stay far below these bounds, which exclude overflow."""


class ImageRecipe(Record, frozen=True, kw_only=True):
    """The steps from an image file to pixels; every field changes the latents."""

    height: Count
    width: Count
    fit: str
    resample: str
    range: str
    max_pixels: Count
    decode: str
    """`full`, or `reduced`: libjpeg scaled a large JPEG down while it decoded it."""
    flip: bool
    """Whether the fitted image is mirrored left to right."""
    orientation: str = "exif applied"
    alpha: str = "on white"
    colour: str = "rgb, profiles ignored"

    @property
    def summary(self) -> str:
        """The recipe on one line: `224 x 224, squash, bilinear, range signed, decode reduced, flipped`."""
        decode = "" if self.decode == "full" else f", decode {self.decode}"
        flipped = ", flipped" if self.flip else ""
        return f"{self.height} x {self.width}, {self.fit}, {self.resample}, range {self.range}{decode}{flipped}"


class TextRecipe(Record, frozen=True, kw_only=True):
    """The steps from a sample's text to tokens; every field changes the latents."""

    source: str
    """The text that is encoded: `caption`, the first answer of the sample's conversation."""
    template: str
    """A text around the sample's, which replaces its one `{}`."""
    max_tokens: Count
    """Tokens per sample: a longer text is cut, a shorter one padded at the end."""
    drop: Count
    """Number of the template's first tokens that are encoded, then left out of the sample."""
    padding: str
    """With `seen`, text tokens attend to padding; with `masked`, they do not; both store the encoder's output there.
    With `zero`, text tokens do not attend to padding, and it is stored as zeros."""

    @property
    def summary(self) -> str:
        """The recipe on one line: `caption, 512 tokens, padding seen`."""
        within = "" if self.template == PLAIN_TEMPLATE else f" within {self.template!r}"
        drop = f", the first {self.drop:,} dropped" if self.drop else ""
        return f"{self.source}{within}, {self.max_tokens:,} tokens{drop}, padding {self.padding}"


class Normalization(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The map from a VAE's latents, as a cache holds them, to the input of its diffusion models.

    Channels of `patch` x `patch` cells are stacked, in the order of `torch.pixel_unshuffle`, then each value becomes
    (value - shift - mean) * scale / std. The record omits what the model does not use.
    """

    latents_mean: tuple[float, ...]
    """Mean of each channel after stacking; empty, like `latents_std`, if the model states none."""
    latents_std: tuple[float, ...]
    latents_shift: float | None = None
    latents_scale: float | None = None
    latents_patch: Side = 1


class EncoderIdentity(Normalization, frozen=True, kw_only=True, omit_defaults=True):
    """The facts that determine an encoder's latents; `weights_sha256` covers config and weights."""

    class_name: str
    weights_sha256: str
    path: Literal["folded", "native"]
    compiled: bool | Literal["auto"]
    """auto: compiled on a GPU that supports it."""
    posterior: str
    compute_dtype: str
    batch_size: Count
    pool: Side = 1
    """A vision tower averages `pool` x `pool` patches into one token; the record omits the value 1."""
    layer: int | None = None
    """Index of the tower's hidden state that is cached, as transformers counts them; the record omits the last one."""
    class_token: bool = False
    """Whether a tower's tokens before the patches are kept; the record omits false."""
    layers: tuple[int, ...] = ()
    """Indices of a text encoder's hidden states whose features were joined; omitted if there is only one."""
    pooled: bool = False
    """Whether a text encoder's one vector per text is cached instead of its tokens; the record omits false."""
    tokenizer_sha256: str = ""
    """SHA-256 over the files of a text encoder's tokenizer; the record omits it for other encoders."""

    @property
    def summary(self) -> str:
        """The encoder on one line: `AutoencoderKLWan, folded, bfloat16, posterior mean, batches of 32`."""
        kept = "" if self.posterior == "none" else f"posterior {self.posterior}, "
        pooled = f"averages of {self.pool} x {self.pool} patches, " if self.pool > 1 else ""
        layer = "" if self.layer is None else f"hidden state {self.layer}, "
        joined = f"hidden states {', '.join(map(str, self.layers))}, " if self.layers else ""
        vector = "pooled vector, " if self.pooled else ""
        kept = f"{kept}{layer}{joined}{vector}{'class token, ' if self.class_token else ''}{pooled}"
        return f"{self.class_name}, {self.path}, {self.compute_dtype}, {kept}batches of {self.batch_size}"


class SampleLayout(Record, frozen=True, kw_only=True):
    """The shape of one sample, which an encoder computes from one image or text: an array of one to four named axes."""

    axes: Annotated[tuple[Axis, ...], msgspec.Meta(min_length=1, max_length=MAX_AXES)]
    """A VAE has `channel, latent_y, latent_x`, a vision tower or a text encoder `token, feature`."""
    shape: tuple[Side, ...]
    feature_axis: Axis
    """The axis that has separate statistics for each entry: a VAE's channels, a tower's features."""
    has_preview: bool
    """Whether a linear map turns a sample into a picture; the axes must then be features, cell rows, cell columns."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"the axes are {', '.join(self.axes)}, but shape has {len(self.shape)}")
        if len({ROW_AXIS, *self.axes}) <= len(self.axes):
            raise ValueError(f"the axes {', '.join(self.axes)} must differ from each other and from {ROW_AXIS}")
        if self.feature_axis not in self.axes:
            raise ValueError(f"feature_axis {self.feature_axis} is not one of the axes {', '.join(self.axes)}")
        if self.has_preview and (len(self.axes) != 3 or self.feature_place != 0):
            raise ValueError(f"a preview needs three axes, features first; the axes are {', '.join(self.axes)}")
        if self.has_preview and self.num_features > MAX_PREVIEW_FEATURES:
            raise ValueError(f"a preview can have at most {MAX_PREVIEW_FEATURES:,} features, got {self.num_features:,}")

    @property
    def feature_place(self) -> int:
        """Index of the feature axis in `shape`."""
        return self.axes.index(self.feature_axis)

    @property
    def num_features(self) -> int:
        return self.shape[self.feature_place]

    @property
    def named_shape(self) -> str:
        """The shape with axis names: `channel 16, latent_y 28, latent_x 28`."""
        return ", ".join(f"{axis} {side}" for axis, side in zip(self.axes, self.shape, strict=True))


class ArraySpec(SampleLayout, frozen=True, kw_only=True, omit_defaults=True):
    """The array of the cache: the shape of a row, and the recipe that made it from an image or a text."""

    dtype: StoreDtype
    codec: CodecName
    encoder: EncoderIdentity
    image: ImageRecipe | None = None
    """The record omits it if samples are texts."""
    text: TextRecipe | None = None
    """The record omits it if samples are images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.image is None) == (self.text is None):
            raise ValueError("an array is made from images or from texts: it has exactly one of `image` and `text`")

    @property
    def images(self) -> ImageRecipe:
        """The image recipe; only for an array that is made from images."""
        assert self.image is not None, "an array of texts"
        return self.image

    @property
    def made_of(self) -> Literal["image", "text"]:
        return "image" if self.text is None else "text"

    @property
    def has_mask(self) -> bool:
        """Whether samples have tokens that may be padding: they are texts, stored token by token."""
        return self.text is not None and "token" in self.axes

    @property
    def recipe_summary(self) -> str:
        """The image or text recipe on one line."""
        return self.images.summary if self.text is None else self.text.summary

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one decoded sample."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize


class Recipe(Record, frozen=True, kw_only=True):
    """The settings that all shards share: the spec without its sample list, so that a cache can grow.

    Every commit record and the seal contain it in full, so that a lost spec can be restored from them.
    """

    format_version: int
    store_format: StoreFormat
    samples_per_shard: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES_PER_SHARD)]
    array: ArraySpec

    def spec(self, rows: int, plan_digest: str) -> "Spec":
        """Make the spec of a cache that has this plan."""
        recipe = {name: getattr(self, name) for name in Recipe.__struct_fields__}
        return Spec(**recipe, rows=rows, plan_digest=plan_digest)


class Spec(Recipe, frozen=True, kw_only=True):
    """The cache's contract with its readers; two caches with equal digests are interchangeable."""

    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS * MAX_SAMPLES_PER_SHARD)]
    plan_digest: str

    @property
    def recipe(self) -> Recipe:
        return Recipe(**{name: getattr(self, name) for name in Recipe.__struct_fields__})

    @property
    def num_shards(self) -> int:
        return -(-self.rows // self.samples_per_shard)

    def shard_rows(self, shard: int) -> range:
        """The rows of a shard; the last shard may be short."""
        first = shard * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.rows))


def require_lengths(length: int, *lists: Sized) -> None:
    """Raise ValueError, which msgspec reports as a fault of the record, unless every list has this length."""
    if length < 1 or any(len(each) != length for each in lists):
        raise ValueError("its lists differ in length, or are empty")


class FileRecord(Record, frozen=True, kw_only=True):
    path: str
    """Relative to the cache's folder."""
    bytes: Count
    sha256: str

    def __post_init__(self) -> None:
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts or "\0" in self.path or not path.parts:
            raise ValueError(f"{self.path!r} is not a path inside a cache")


class FeatureStatistics(Record, frozen=True, kw_only=True):
    """Sums over every stored value of the cached samples, per feature, in float64."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
    """Number of values per feature."""
    sum: tuple[Moment, ...]
    sum_of_squares: tuple[Moment, ...]
    minimum: tuple[Moment, ...]
    maximum: tuple[Moment, ...]

    def __post_init__(self) -> None:
        require_lengths(len(self.sum), self.sum_of_squares, self.minimum, self.maximum)


class PreviewEquations(Record, frozen=True, kw_only=True):
    """Normal equations of the least-squares map from [features of a cell, 1] to RGB in [0, 1]."""

    gram: tuple[tuple[Moment, ...], ...]
    moment: tuple[tuple[Moment, ...], ...]

    def __post_init__(self) -> None:
        require_lengths(len(self.gram), self.moment, *self.gram)
        require_lengths(3, *self.moment)


class CommitContent(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The contents of a shard; equal inputs give equal contents."""

    shard: Count
    recipe: Recipe
    plan_digest: str
    """Digest of the shard's planned rows, which exposes a shard of another cache."""
    files: Annotated[tuple[FileRecord, ...], msgspec.Meta(min_length=1)]
    rows_digest: str
    """SHA-256 over (row, id, content_sha256) of every planned sample; it exposes a swapped or renumbered shard."""
    cached: Count
    rejected: Count
    reasons: dict[str, Count]
    """Number of rejected samples by kind of reason: the words before its colon."""
    non_finite: Count
    """Number of non-finite values that the encoder returned; their samples are rejected."""
    unreadable_exif: Count = 0
    """Cached samples whose image has broken EXIF and was therefore not rotated; the record omits 0."""
    cut_texts: Count = 0
    """Cached samples whose text was cut, since it has more tokens than a sample; the record omits 0."""
    statistics: FeatureStatistics | None
    """The sums over the shard's cached samples, or None if it has none."""
    preview: PreviewEquations | None
    """The equations for the preview, or None if the shard has no cached sample or the array no preview."""


class CommitRun(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The circumstances of a shard's build, such as times and hosts; they enter no digest but the record's own."""

    attempt: Count
    seconds: float
    images_per_s: float
    host: str
    device: str
    versions: dict[str, str]
    hardware: dict[str, str] = msgspec.field(default_factory=dict)
    """The device: a GPU's name, driver, CUDA and cuDNN, or a CPU's name and widest vector instructions."""

    @property
    def made_by(self) -> str:
        """Hardware and libraries: `NVIDIA H100, cuda 12.8, cudnn 9.10.2, driver 570.86.15, diffusers 0.38, ...`."""
        first = [value for name, value in self.hardware.items() if name in ("gpu", "cpu")]
        others = [(name, value) for name, value in sorted(self.hardware.items()) if name not in ("gpu", "cpu")]
        return ", ".join([*first, *(" ".join(each) for each in (*others, *sorted(self.versions.items())))])


class CommitRecord(Record, frozen=True, kw_only=True):
    max_bytes: ClassVar[int] = 64 * 2**20
    """Equations for `MAX_PREVIEW_FEATURES` features take 25 MB, sums of `MAX_SIDE` features 7 MB."""

    format_version: int
    content: CommitContent
    run: CommitRun
    sha256: str
    """SHA-256 over the record's canonical form without this field."""


class Listed(Record, frozen=True, kw_only=True):
    """The source's version when it was listed, and the plan of everything in it.

    A resumed build that finds both unchanged need not list the source again.
    """

    source: str
    """Digest over names, sizes, times and ETags of the source's files."""
    plan_sha256: str
    """SHA-256 of the plan's file."""
    plan_digest: str
    shard_digests: tuple[str, ...]
    """Plan digest of each shard's rows; `plan_digest` covers all rows."""


class BuildRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The configuration that the cache was built with: sources, encoder and recipe. It enters no digest."""

    max_bytes: ClassVar[int] = 128 * 2**20
    """The digests of `MAX_SHARDS` take 67 MB."""

    format_version: int
    config: dict[str, Any]
    listed: Listed | None = None
    sha256: str
    """SHA-256 over the record's canonical form without this field."""


class PreviewMap(Record, frozen=True, kw_only=True):
    """RGB in [0, 1] = weight · features of a cell + bias: a picture without a decoder."""

    weight: tuple[tuple[Moment, ...], ...]
    """[3, features]."""
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
    """The preview's linear map, or None if the array has no preview."""

    def __post_init__(self) -> None:
        weight = self.preview.weight if self.preview else ()
        require_lengths(len(self.mean), self.std, self.minimum, self.maximum, *weight)


class Seal(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The summary of a complete cache; it holds no times, so that equal inputs give an equal seal."""

    max_bytes: ClassVar[int] = 128 * 2**20
    """The digests of `MAX_SHARDS` take 67 MB, their counts 8 MB."""

    format_version: int
    recipe: Recipe
    spec_digest: str
    identity: str
    """The cache identity: SHA-256 over `commits` joined in order."""
    planned: Count
    cached: Count
    rejected: Count
    reasons: dict[str, Count]
    unreadable_exif: Count = 0
    """The record omits 0."""
    cut_texts: Count = 0
    """The record omits 0."""
    cached_per_shard: tuple[Count, ...]
    commits: tuple[str, ...]
    """SHA-256 of each commit record's content, in shard order; it identifies an edited record."""
    plan_file: FileRecord
    array: ArraySummary
    sha256: str
    """SHA-256 over the seal's canonical form without this field."""

    def holds(self, shard: int, content: CommitContent) -> bool:
        """Whether the shard was sealed with this content."""
        return shard < len(self.commits) and self.commits[shard] == content.digest
