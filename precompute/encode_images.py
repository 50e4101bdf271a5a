"""Encode single files with the recipe and the encoder of a cache, as a build would store them.

A sample's bits depend on its batch, so every batch has the cache's batch size and is filled up with grey.
"""

# Axes: N samples of a batch, T frames, Y X pixels, 3 RGB.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from cache_store import Cache
from cache_store.cache.entry_points import EncodeImages, Frames
from cache_store.errors import ConfigError, SourceError
from cache_store.format.array import ArrayRecipe, ArraySpec, ImageRecipe, Size
from cache_store.format.quantized import as_read
from cache_store.format.tables import CLIP_START
from cache_store.messages import differences_between, refuse
from precompute.config import BuildConfig
from precompute.encode.worker import ENCODER_THREADS
from precompute.encoders.encoder import PIXEL_RANGES, Encoder
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.registry import find_family, load_encoder, taken_fields
from precompute.images.buckets import PLACES, placed_size
from precompute.images.config import RECIPE_FIELDS
from precompute.images.decode import silence_decoders
from precompute.images.fit import RESAMPLING
from precompute.images.rejected import Rejected
from precompute.inputs import Reader, make_reader
from precompute.inputs.reader import Sample, inputs_of, read_one
from precompute.sources.images import Images
from precompute.sources.place import Located, Place


def encode_images(cache: Cache, images: Sequence[Path | str], device: str = "auto") -> list[np.ndarray]:
    """Encode image files, or the beginnings of videos for a cache of clips, as the build of `cache` did.

    Each sample, [*shape], is as the cache would give it; samples differ in shape if the cache has several sizes.
    """
    if not isinstance(cache, Cache):
        raise ConfigError(f"encode_images: expected a cache, as open_cache gives it, got {cache!r}")
    return open_encoder(cache.spec.array, BuildConfig.of_cache(cache.store).encoder.model, device)(images)


def open_encoder(array: ArrayRecipe, model: str, device: str = "auto") -> EncodeImages:
    """Open the encoder that made arrays of this recipe; StaleError if `model` is another one."""
    if array.image is None:
        raise ConfigError("the cache was made from texts, so no image can be encoded as its samples were")
    refuse_unknown_recipe(array.image)
    family, _ = find_family(EncoderConfig(model=model))  # a model of another class may not use some fields
    takes = taken_fields(family, array.image)
    encoder = load_encoder(EncoderConfig.from_identity(array.encoder, takes, model, device), array.image)
    refuse_wrong_model(array, encoder, model)
    silence_decoders()
    reader = make_reader(LocalFiles(), array)

    def encode(images: Sequence[Path | str | Frames]) -> list[np.ndarray]:
        frames = [image if isinstance(image, np.ndarray) else read_frames(reader, array, image) for image in images]
        order = sorted(range(len(frames)), key=lambda place: frames[place].shape)
        samples = dict[int, np.ndarray]()
        for shape, places in groupby(order, lambda place: frames[place].shape):
            size, same = Size(*shape[:3]), [*places]
            sized = array.of_size(size, encoder.array(size).shape)
            made = encode_same_size(encoder, sized, [frames[place] for place in same])
            samples |= zip(same, checked([images[place] for place in same], made, sized), strict=True)
        return [samples[place] for place in range(len(frames))]

    return encode


class LocalFiles(Images):
    """Files of this machine, by their paths."""

    def locate(self, name: str) -> Located:
        return Located("")

    def read(self, name: str, place: Place | None = None) -> bytes:
        return Path(name).read_bytes()


def refuse_unknown_recipe(image: ImageRecipe) -> None:
    known = ImageRecipe(rule=image.rule, **{name: getattr(image, name) for name in (*RECIPE_FIELDS, "clip")})
    is_known = image.rule.preset in PLACES and image.resample in RESAMPLING and image.range in PIXEL_RANGES
    if known != image or not is_known or image.decode not in ("full", "reduced"):
        raise ConfigError("this version of precompute cannot follow the cache's image recipe")


def refuse_wrong_model(array: ArrayRecipe, encoder: Encoder, model: str) -> None:
    if differences := differences_between(msgspec.to_builtins(array.encoder), msgspec.to_builtins(encoder.identity)):
        refuse(f"{model} is not the encoder that made the cache", differences, ["give the model that made it"])


def read_frames(reader: Reader, array: ArrayRecipe, path: Path | str) -> Frames:
    """Read a file as uint8 [T, Y, X, 3], fitted for the encoder; raise SourceError if a build would reject it."""
    sample: Sample = {"uri": str(path), "fingerprint": "", "place": None, CLIP_START: 0.0}
    own = reader.size(sample)
    try:
        size = (own and placed_size(array.images.rule, own)) or Size(1, 1, 1)  # reading it then tells why
        sized = array.of_size(size, (array.features,) * len(array.axes))
        frames, outcome = read_one(reader, sample, sized)
    except Rejected as rejected:
        raise SourceError(f"{path}: {rejected.reason}") from None
    if outcome.reason is not None:
        raise SourceError(f"{path}: {outcome.reason}")
    return frames


def encode_same_size(encoder: Encoder, array: ArraySpec, frames: Sequence[Frames]) -> np.ndarray:
    """Encode frames in batches of the cache's batch size: float32 [N, *shape]."""
    size, parts = array.encoder.batch_size, list[np.ndarray]()
    for start in range(0, len(frames), size):
        part = frames[start : start + size]
        batch_NTYX3 = np.full((size, *inputs_of(array).shape), inputs_of(array).filler, np.uint8)
        batch_NTYX3[: len(part)] = part
        with encoder_threads():
            parts.append(encoder.encode(torch.from_numpy(batch_NTYX3))[: len(part)].cpu().numpy())
    return np.concatenate(parts)


@contextmanager
def encoder_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(ENCODER_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def checked(images: Sequence[Path | str | Frames], samples: np.ndarray, array: ArraySpec) -> NDArray[np.float32]:
    rounded: NDArray[np.float32] = as_read(samples, array.dtype)
    for place, values in enumerate(rounded):
        if not np.isfinite(values).all():
            name = f"image {place}" if isinstance(images[place], np.ndarray) else images[place]
            raise SourceError(f"{name}: its latent is not finite in {array.dtype}")
    return rounded
