"""The array of a cache: what a sample is, and the encoder and recipe that made it from an image or a text.

docs/format.md says what each field is.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_store.format.record import Record

ROW_AXIS = "row"
"""Name of the array's first axis; a sample's own axes must have other names."""

StoreDtype = Literal["float16", "bfloat16", "float32", "uint8"]
CodecName = Literal["none", "lz4", "zstd"]

DTYPES: dict[str, np.dtype] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("<f4"),
    "uint8": np.dtype("u1"),
}
"""Dtypes on disk; uint8 stores a code for each value, as `cache_store.format.quantized` says."""

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


class Size(NamedTuple):
    """The size of what an encoder maps to one sample: an image is one frame, a text is 1 x 1 x its tokens."""

    frames: Side
    height: Side
    """In pixels, as `width`."""
    width: Side

    @property
    def name(self) -> str:
        """Such as `1344x768`: width, then height; the frames come first if there are several."""
        return f"{self.width}x{self.height}" if self.frames == 1 else f"{self.frames}x{self.width}x{self.height}"

    @classmethod
    def of_name(cls, name: str) -> "Size":
        *frames, width, height = map(int, name.split("x"))
        size = cls(frames[0] if frames else 1, height, width)
        if len(frames) > 1 or min(size) < 1 or size.name != name:
            raise ValueError(f"{name!r} is not the name of a size")
        return size


class SizeRule(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The rule that gives each image its size, and says how it is scaled and cut to that."""

    preset: str
    resolution: Count = 0
    pixels: Count = 0
    min: Count = 0
    max: Count = 0
    step: Count = 0
    no_upscale: bool = False
    sizes: tuple[tuple[Side, Side], ...] = ()
    min_aspect: float | None = None
    max_aspect: float | None = None
    num_aspects: Count = 0
    max_aspect_error: float | None = None
    """Images whose aspect differs by this or more from the nearest bucket's are rejected. The record omits None; it
    would not omit a float, which is another object after a pickle."""

    @property
    def summary(self) -> str:
        """The rule on one line: `224x224, squash`; `buckets sd-scripts, resolution 1024, min 256, step 64`."""
        if self.preset in FIXED:
            edge = f" {self.resolution}" if self.resolution else ""
            return ", ".join([*(f"{width}x{height}" for width, height in self.sizes), f"{self.preset}{edge}"])
        given = [f"{name} {getattr(self, name)}" for name in self.__struct_fields__[1:] if getattr(self, name)]
        return ", ".join([f"buckets {self.preset}", *given])


FIXED = ("squash", "crop", "pad", "edge")
"""Rules that give all images one size."""


class ClipRecipe(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Which frames of a video a sample has; the plan's column `clip_start` says where the first one is."""

    counts: Annotated[tuple[Side, ...], msgspec.Meta(min_length=1)]
    fps: float | None = None

    @property
    def summary(self) -> str:
        """Such as `81 frames at 16 fps`."""
        *most, last = map(str, self.counts)
        frames = " or ".join(filter(None, [", ".join(most), last]))
        return f"{frames} frames at {f'{self.fps:g} fps' if self.fps else 'the rate of each file'}"


class ImageRecipe(Record, frozen=True, kw_only=True):
    """The steps from an image file to pixels; every field changes the latents."""

    rule: SizeRule
    resample: str
    range: str
    max_pixels: Count
    decode: str
    flip: bool
    orientation: str = "exif applied"
    alpha: str = "on white"
    colour: str = "rgb, profiles ignored"
    clip: ClipRecipe | msgspec.UnsetType = msgspec.UNSET
    """The record omits it if samples are images; else each frame of a clip is fitted as an image is."""

    @property
    def summary(self) -> str:
        """The recipe on one line: `224x224, squash, bilinear, range signed, decode reduced, flipped`."""
        decode = "" if self.decode == "full" else f", decode {self.decode}"
        flipped = ", flipped" if self.flip else ""
        clip = f"{self.clip.summary}, " if self.clip else ""
        return f"{clip}{self.rule.summary}, {self.resample}, range {self.range}{decode}{flipped}"


class TextRecipe(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The steps from a sample's text to tokens; every field changes the latents."""

    source: str
    caption: Side = 1
    shuffle_tags: Count | None = None
    keep_tags: Count = 0
    clean: str
    template: str
    max_tokens: Count
    drop: Count
    keeps_first: bool
    padding: str
    """With `seen`, text tokens attend to padding; with `masked`, they do not; both store the encoder's output there.
    With `zero`, text tokens do not attend to padding, with `seen-zero` they do, and it is stored as zeros. `left` is
    `masked` with the padding before the text."""
    null_prompt: str
    null_tokens: Count

    def mask(self, counts: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which tokens are a text's, [N, T], of texts with so many tokens each, [N]; the others are padding."""
        place = np.arange(self.max_tokens)
        mask: NDArray[np.bool_] = (place[::-1] if self.padding == "left" else place) < counts[:, None]
        return mask

    @property
    def summary(self) -> str:
        """The recipe on one line: `caption, prompt_clean, 512 tokens, padding zero`."""
        clean = "" if self.clean == "none" else f", {self.clean}"
        within = "" if self.template == PLAIN_TEMPLATE else f" within {self.template!r}"
        first = f"after the first, {self.drop:,}" if self.keeps_first else f"the first {self.drop:,}"
        drop = f", {first} dropped" if self.drop else ""
        source = self.source if self.caption == 1 else f"{self.source} {self.caption}"
        if self.shuffle_tags is not None:
            source += f", tags after the first {self.keep_tags:,} shuffled by seed {self.shuffle_tags}"
        return f"{source}{clean}{within}, {self.max_tokens:,} tokens{drop}, padding {self.padding}"


class Normalization(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The map from a VAE's latents, as a cache holds them, to the input of its diffusion models.

    Channels of `patch` x `patch` cells are stacked, in the order of `torch.pixel_unshuffle`, then each value becomes
    (value - shift - mean) * scale / std. The record omits what the model does not use.
    """

    latents_mean: tuple[float, ...]
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
    posterior: str
    compute_dtype: str
    batch_size: Count
    pool: Side = 1
    layer: int | None = None
    class_token: bool = False
    layers: tuple[int, ...] = ()
    pooled: bool = False
    tokenizer_sha256: str = ""

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


class SampleAxes(Record, frozen=True, kw_only=True):
    """The axes of a sample, which an encoder computes from one image, clip or text: one to four, with names."""

    axes: Annotated[tuple[Axis, ...], msgspec.Meta(min_length=1, max_length=MAX_AXES)]
    """A VAE has `channel, latent_y, latent_x`, a vision tower or a text encoder `token, feature`."""
    feature_axis: Axis
    has_preview: bool
    """Whether a linear map turns a sample into a picture; the axes must then be features, cell rows, cell columns, with
    latent frames after the features if samples are clips."""

    def __post_init__(self) -> None:
        if len({ROW_AXIS, *self.axes}) <= len(self.axes):
            raise ValueError(f"the axes {', '.join(self.axes)} must differ from each other and from {ROW_AXIS}")
        if self.feature_axis not in self.axes:
            raise ValueError(f"feature_axis {self.feature_axis} is not one of the axes {', '.join(self.axes)}")
        if self.has_preview and (len(self.axes) not in (3, 4) or self.feature_place != 0):
            raise ValueError(f"a preview needs three or four axes, features first; the axes are {', '.join(self.axes)}")

    def refuse_shape(self, shape: Sequence[int], features: int) -> None:
        if len(shape) != len(self.axes):
            raise ValueError(f"the axes are {', '.join(self.axes)}, but shape has {len(shape)}")
        if shape[self.feature_place] != features:
            raise ValueError(f"{self.feature_axis} is {shape[self.feature_place]}, expected {features}")
        if self.has_preview and features > MAX_PREVIEW_FEATURES:
            raise ValueError(f"a preview can have at most {MAX_PREVIEW_FEATURES:,} features, got {features:,}")

    def named(self, shape: Sequence[int]) -> str:
        return ", ".join(f"{axis} {side}" for axis, side in zip(self.axes, shape, strict=True))

    @property
    def feature_place(self) -> int:
        return self.axes.index(self.feature_axis)

    @property
    def channel_axis(self) -> int:
        """Index of the feature axis counted from the end, as in batches: −3 of images' latents, −4 of clips'."""
        return self.feature_place - len(self.axes)

    @property
    def can_be_quantized(self) -> bool:
        """Whether a sample is a few features of many values each, as a VAE's latents are."""
        return self.feature_place == 0 and len(self.axes) > 1


class SampleLayout(SampleAxes, frozen=True, kw_only=True):
    """The sample that an encoder makes of an input of one size."""

    shape: tuple[Side, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_shape(self.shape, self.num_features)

    @property
    def num_features(self) -> int:
        return self.shape[self.feature_place] if len(self.shape) == len(self.axes) else 0


class ArrayRecipe(SampleAxes, frozen=True, kw_only=True, omit_defaults=True):
    """Axes, storage and recipe, which samples of all sizes of a cache share."""

    features: Side
    dtype: StoreDtype
    codec: CodecName
    encoder: EncoderIdentity
    image: ImageRecipe | None = None
    text: TextRecipe | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.image is None) == (self.text is None):
            raise ValueError("an array is made from images or from texts: it has exactly one of `image` and `text`")
        if self.is_quantized and not self.can_be_quantized:
            raise ValueError(f"dtype uint8 needs features before other axes; the axes are {', '.join(self.axes)}")

    def of_size(self, size: Size, shape: Sequence[int]) -> "ArraySpec":
        shared = {name: getattr(self, name) for name in ArrayRecipe.__struct_fields__}
        return ArraySpec(**shared, size=size, shape=tuple(shape))

    @property
    def images(self) -> ImageRecipe:
        assert self.image is not None, "an array of texts"
        return self.image

    @property
    def made_of(self) -> Literal["image", "clip", "text"]:
        if self.image is None:
            return "text"
        return "clip" if self.image.clip else "image"

    @property
    def has_mask(self) -> bool:
        """Whether samples have tokens that may be padding: they are texts, stored token by token."""
        return self.text is not None and "token" in self.axes

    @property
    def named_axes(self) -> str:
        """The axes, and how many features there are: `channel 16, latent_y, latent_x`."""
        return ", ".join(f"{axis} {self.features}" if axis == self.feature_axis else axis for axis in self.axes)

    @property
    def recipe_summary(self) -> str:
        return self.images.summary if self.text is None else self.text.summary

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]

    @property
    def is_quantized(self) -> bool:
        return self.dtype == "uint8"

    @property
    def read_dtype(self) -> np.dtype:
        """Dtype of the samples that a reader gives: the one on disk, or float32 of quantized ones."""
        return DTYPES["float32"] if self.is_quantized else self.numpy_dtype


class ArraySpec(ArrayRecipe, frozen=True, kw_only=True, omit_defaults=True):
    """The array of all samples of one size."""

    size: Size
    shape: tuple[Side, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_shape(self.shape, self.features)

    @property
    def preview_cells(self) -> tuple[int, int]:
        return self.shape[-2], self.shape[-1]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample on disk, without compression."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize
