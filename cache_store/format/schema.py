"""What a cache says about itself: the spec, the commit records and the seal, as strict frozen records."""

import math
from collections.abc import Sized
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

import ml_dtypes
import msgspec
import numpy as np

from cache_store.format.record import Record

ROW_AXIS = "row"
"""The first axis of the array; a sample's own axes have other names."""

StoreFormat = Literal["zarr", "webdataset"]
StoreDtype = Literal["float16", "bfloat16", "float32"]
CodecName = Literal["none", "lz4", "zstd"]

DTYPES: dict[str, np.dtype] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("<f4"),
}

MAX_SHARDS = 10**6
"""Their files are numbered with six digits; and whoever opens a cache may list them all."""
MAX_SAMPLES_PER_SHARD = 2**20
"""A shard's index is held in memory: 16 bytes a sample."""
MAX_AXES = 4
MAX_SIDE = 2**16
MAX_SAMPLE_BYTES = 2**30
MAX_PREVIEW_FEATURES = 2**10
"""A record holds the square of their number."""

MAX_COUNT = 2**53 - 1
"""The largest integer of canonical JSON (RFC 8785)."""

PLAIN_TEMPLATE = "{}"
"""The template of a text that stands alone."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Side = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIDE)]
Axis = Annotated[str, msgspec.Meta(pattern=r"\A[a-z][a-z0-9_]{0,31}\Z")]
Moment = Annotated[float, msgspec.Meta(ge=-1e100, le=1e100)]
"""Of latents, which are float32 at most: sums and squares of such numbers stay far below, and far from overflow."""


class ImageRecipe(Record, frozen=True, kw_only=True):
    """How an image becomes pixels; everything here changes latents."""

    height: Count
    width: Count
    fit: str
    resample: str
    range: str
    max_pixels: Count
    decode: str
    """`full`, or `reduced`: by libjpeg, while a large JPEG was decoded."""
    flip: bool
    """Whether left and right are exchanged, once the image is fitted."""
    orientation: str = "exif applied"
    alpha: str = "on white"
    colour: str = "rgb, profiles ignored"

    @property
    def summary(self) -> str:
        """As `224 x 224, squash, bilinear, range signed, decode reduced, flipped`."""
        decode = "" if self.decode == "full" else f", decode {self.decode}"
        flipped = ", flipped" if self.flip else ""
        return f"{self.height} x {self.width}, {self.fit}, {self.resample}, range {self.range}{decode}{flipped}"


class TextRecipe(Record, frozen=True, kw_only=True):
    """How a sample's text becomes tokens; everything here changes samples."""

    source: str
    """Which text of a sample: `caption`, the first answer of its conversation."""
    template: str
    """What the text is put into, in place of its one `{}`."""
    max_tokens: Count
    """Tokens of a sample: a longer text is cut, a shorter one padded behind."""
    drop: Count
    """Tokens at the beginning, the template's, that are encoded and then left out."""
    padding: str
    """`seen`: other tokens attend to padding, and it is stored as the encoder gives it; `masked`: it is stored so, but
    none attends to it; `zero`: none attends to it, and zeros are stored in its place."""

    @property
    def summary(self) -> str:
        """As `caption, 512 tokens, padding seen`."""
        within = "" if self.template == PLAIN_TEMPLATE else f" within {self.template!r}"
        drop = f", the first {self.drop:,} dropped" if self.drop else ""
        return f"{self.source}{within}, {self.max_tokens:,} tokens{drop}, padding {self.padding}"


class Normalization(Record, frozen=True, kw_only=True, omit_defaults=True):
    """From latents as a VAE gives them, and caches hold them, to what its diffusion models are trained on.

    Channels of `patch` x `patch` cells are stacked, in the order of `torch.pixel_unshuffle`, then each value becomes
    (value - shift - mean) * scale / std. What a model leaves out of it is left out of the record.
    """

    latents_mean: tuple[float, ...]
    """Mean of each channel, once channels are stacked; empty, like `latents_std`, where the model states none."""
    latents_std: tuple[float, ...]
    latents_shift: float | None = None
    latents_scale: float | None = None
    latents_patch: Side = 1


class EncoderIdentity(Normalization, frozen=True, kw_only=True, omit_defaults=True):
    """What must be equal for two encoders to give equal latents; `weights_sha256` covers config and weights."""

    class_name: str
    weights_sha256: str
    path: Literal["folded", "native"]
    compiled: bool | Literal["auto"]
    """auto: on a GPU that has what it takes."""
    posterior: str
    compute_dtype: str
    batch_size: Count
    pool: Side = 1
    """Of a tower's patches, `pool` x `pool` are averaged into a token; left out of the record where it is 1."""
    layer: int | None = None
    """The tower's hidden state that is cached, as transformers counts them; left out where it is the last."""
    class_token: bool = False
    """Whether a tower's tokens before the patches are kept; left out where they are not."""
    layers: tuple[int, ...] = ()
    """Hidden states of a text encoder whose features were joined; left out where it is one."""
    pooled: bool = False
    """Whether a text encoder's one vector of a text is cached; left out where its tokens are."""
    tokenizer_sha256: str = ""
    """Over the files of a text encoder's tokenizer."""

    @property
    def summary(self) -> str:
        """As `AutoencoderKLWan, folded, bfloat16, posterior mean, batches of 32`."""
        kept = "" if self.posterior == "none" else f"posterior {self.posterior}, "
        pooled = f"averages of {self.pool} x {self.pool} patches, " if self.pool > 1 else ""
        layer = "" if self.layer is None else f"hidden state {self.layer}, "
        joined = f"hidden states {', '.join(map(str, self.layers))}, " if self.layers else ""
        vector = "pooled vector, " if self.pooled else ""
        kept = f"{kept}{layer}{joined}{vector}{'class token, ' if self.class_token else ''}{pooled}"
        return f"{self.class_name}, {self.path}, {self.compute_dtype}, {kept}batches of {self.batch_size}"


class SampleLayout(Record, frozen=True, kw_only=True):
    """What an encoder makes of one image or text: an array of one to four named axes."""

    axes: Annotated[tuple[Axis, ...], msgspec.Meta(min_length=1, max_length=MAX_AXES)]
    """As `channel, latent_y, latent_x` of a VAE, or `token, feature` of a vision tower or a text encoder."""
    shape: tuple[Side, ...]
    feature_axis: Axis
    """The axis whose entries each have statistics of their own: a VAE's channels, a tower's features."""
    has_preview: bool
    """Whether a linear map shows a sample as a picture; its axes are then features, rows and columns of cells."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"the axes are {', '.join(self.axes)}, but shape has {len(self.shape)}")
        if len({ROW_AXIS, *self.axes}) <= len(self.axes):
            raise ValueError(f"the axes {', '.join(self.axes)} must differ, also from {ROW_AXIS}")
        if self.feature_axis not in self.axes:
            raise ValueError(f"feature_axis {self.feature_axis} is none of the axes {', '.join(self.axes)}")
        if self.has_preview and (len(self.axes) != 3 or self.feature_place != 0):
            raise ValueError(f"a preview needs three axes, features first; the axes are {', '.join(self.axes)}")
        if self.has_preview and self.num_features > MAX_PREVIEW_FEATURES:
            raise ValueError(f"{self.num_features:,} features, a preview is made of {MAX_PREVIEW_FEATURES:,} at most")

    @property
    def feature_place(self) -> int:
        """Where in `shape` the feature axis stands."""
        return self.axes.index(self.feature_axis)

    @property
    def num_features(self) -> int:
        return self.shape[self.feature_place]

    @property
    def named_shape(self) -> str:
        """As `channel 16, latent_y 28, latent_x 28`."""
        return ", ".join(f"{axis} {side}" for axis, side in zip(self.axes, self.shape, strict=True))


class ArraySpec(SampleLayout, frozen=True, kw_only=True, omit_defaults=True):
    """The array of the cache: what a row holds and how it was made, of an image or of a text."""

    dtype: StoreDtype
    codec: CodecName
    encoder: EncoderIdentity
    image: ImageRecipe | None = None
    """Left out of the record where samples are of texts."""
    text: TextRecipe | None = None
    """Left out of the record where samples are of images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.image is None) == (self.text is None):
            raise ValueError("an array is made of images or of texts: it has one of `image` and `text`")

    @property
    def images(self) -> ImageRecipe:
        """The recipe of an array that is made of images."""
        assert self.image is not None, "an array of texts"
        return self.image

    @property
    def made_of(self) -> Literal["image", "text"]:
        return "image" if self.text is None else "text"

    @property
    def has_mask(self) -> bool:
        """Whether some tokens of a sample may be padding: it is of a text, token by token."""
        return self.text is not None and "token" in self.axes

    @property
    def recipe_summary(self) -> str:
        """How an image or a text enters the encoder."""
        return self.images.summary if self.text is None else self.text.summary

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one decoded sample."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize


class Recipe(Record, frozen=True, kw_only=True):
    """All that is common to every shard: the spec without its sample list, so that a cache can grow.

    It stands whole in every commit record and in the seal, so that a lost spec is copied, not guessed.
    """

    format_version: int
    store_format: StoreFormat
    samples_per_shard: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES_PER_SHARD)]
    array: ArraySpec

    def spec(self, rows: int, plan_digest: str) -> "Spec":
        """Of a cache of that plan."""
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
    """ValueError, which a parser turns into a complaint about the record, where a list has another length."""
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
            raise ValueError(f"{self.path!r} is no path inside a cache")


class FeatureStatistics(Record, frozen=True, kw_only=True):
    """Sums over every stored value of the cached samples, per feature, in float64."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
    """Values per feature."""
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
    """What a shard holds; equal inputs give equal contents."""

    shard: Count
    recipe: Recipe
    plan_digest: str
    """Of the shard's own planned rows, so that a shard of another cache shows."""
    files: Annotated[tuple[FileRecord, ...], msgspec.Meta(min_length=1)]
    rows_digest: str
    """SHA-256 over (row, id, content_sha256) of every planned sample, so that a swapped or renumbered shard shows."""
    cached: Count
    rejected: Count
    reasons: dict[str, Count]
    """Rejected samples by kind of reason (what stands before the colon)."""
    non_finite: Count
    """Non-finite values the encoder gave; their samples are rejected."""
    unreadable_exif: Count = 0
    """Cached samples whose image has broken EXIF, so that it was not turned; left out of the record where it is 0."""
    cut_texts: Count = 0
    """Cached samples whose text has more tokens than are kept; left out of the record where it is 0."""
    statistics: FeatureStatistics | None
    """None where no sample of the shard was cached."""
    preview: PreviewEquations | None
    """None there too, and where the array has no preview."""


class CommitRun(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How the shard came to be: clocks and hosts, outside every digest but the record's own."""

    attempt: Count
    seconds: float
    images_per_s: float
    host: str
    device: str
    versions: dict[str, str]
    hardware: dict[str, str] = msgspec.field(default_factory=dict)
    """The device: a GPU's name, driver, CUDA and cuDNN, or a processor's name and its widest instructions."""

    @property
    def made_by(self) -> str:
        """Hardware and libraries, as `NVIDIA H100, cuda 12.8, cudnn 9.10.2, driver 570.86.15, diffusers 0.38, ...`."""
        first = [value for name, value in self.hardware.items() if name in ("gpu", "cpu")]
        others = [(name, value) for name, value in sorted(self.hardware.items()) if name not in ("gpu", "cpu")]
        return ", ".join([*first, *(" ".join(each) for each in (*others, *sorted(self.versions.items())))])


class CommitRecord(Record, frozen=True, kw_only=True):
    max_bytes: ClassVar[int] = 64 * 2**20
    """The preview's equations of `MAX_PREVIEW_FEATURES` take 25 MB, the sums of `MAX_SIDE` features 7 MB."""

    format_version: int
    content: CommitContent
    run: CommitRun
    sha256: str
    """Over the record's canonical form without this field."""


class Listed(Record, frozen=True, kw_only=True):
    """A source as it was when it was listed, and the plan of all that it held: to go on, a build lists it again only
    where one of them is another now.
    """

    source: str
    """What follows from names, sizes, times and ETags of its files."""
    plan_sha256: str
    """Of the plan's file."""
    plan_digest: str
    shard_digests: tuple[str, ...]
    """Of the rows of each shard, as `plan_digest` is of all."""


class BuildRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What the cache was built from: sources, encoder and recipe as they were configured; enters no digest."""

    max_bytes: ClassVar[int] = 128 * 2**20
    """The digests of `MAX_SHARDS` take 67 MB."""

    format_version: int
    config: dict[str, Any]
    listed: Listed | None = None
    sha256: str
    """Over the record's canonical form without this field."""


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
    """None where the array has none."""

    def __post_init__(self) -> None:
        weight = self.preview.weight if self.preview else ()
        require_lengths(len(self.mean), self.std, self.minimum, self.maximum, *weight)


class Seal(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The whole cache's roll-up; holds no clock, so equal inputs give an equal seal."""

    max_bytes: ClassVar[int] = 128 * 2**20
    """The digests of `MAX_SHARDS` take 67 MB, their counts 8 MB."""

    format_version: int
    recipe: Recipe
    spec_digest: str
    identity: str
    """SHA-256 over `commits`, one after the other: the cache identity."""
    planned: Count
    cached: Count
    rejected: Count
    reasons: dict[str, Count]
    unreadable_exif: Count = 0
    """Left out where it is 0."""
    cut_texts: Count = 0
    """Left out where it is 0."""
    cached_per_shard: tuple[Count, ...]
    commits: tuple[str, ...]
    """SHA-256 of every commit record's content, shards in order, so that an edited one is named."""
    plan_file: FileRecord
    array: ArraySummary
    sha256: str
    """Over the seal's canonical form without this field."""

    def holds(self, shard: int, content: CommitContent) -> bool:
        """Whether the shard was sealed with this content."""
        return shard < len(self.commits) and self.commits[shard] == content.digest
