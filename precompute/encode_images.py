"""Encode single images with the recipe and the encoder of a cache, as a build would store them.

A sample's bits depend on its batch, so every batch has the cache's batch size and is filled up with grey.
"""

# Axes: N images of a batch, Y X pixels, 3 RGB.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch
from PIL import Image

from cache_store import Cache
from cache_store.cache.entry_points import EncodeImages
from cache_store.errors import ConfigError, SourceError
from cache_store.format.array import ArraySpec
from cache_store.format.quantized import as_read
from cache_store.messages import differences_between, refuse
from precompute.config import BuildConfig
from precompute.encode.worker import ENCODER_THREADS
from precompute.encoders.encoder import Encoder
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.registry import find_family, load_encoder
from precompute.images.decode import RECIPE_FIELDS, ImageConfig, decode_image, silence_decoders
from precompute.images.fit import MID_GREY, fit_image, to_pixels
from precompute.images.rejected import Rejected


def encode_images(cache: Cache, images: Sequence[Path | str], device: str = "auto") -> np.ndarray:
    """Encode image files as the build of `cache` did: [N, *shape], as the cache would give them."""
    if not isinstance(cache, Cache):
        raise ConfigError(f"encode_images: expected a cache, as open_cache gives it, got {cache!r}")
    return open_encoder(cache.spec.array, BuildConfig.of_cache(cache.store).encoder.model, device)(images)


def open_encoder(array: ArraySpec, model: str, device: str = "auto") -> EncodeImages:
    """Open the encoder that made `array`, for `cache_store.cache.entry_points`.

    Raises StaleError if `model` is another encoder.
    """
    identity, range_ = array.encoder, image_config(array).range
    family, _ = find_family(EncoderConfig(model=model))  # a model of another class may not use some fields
    encoder = load_encoder(EncoderConfig.from_identity(identity, family.takes, model, device), range_)
    refuse_wrong_model(array, encoder, model)
    silence_decoders()

    def encode(images: Sequence[Path | str | Image.Image]) -> np.ndarray:
        pixels_NYX3 = [read_pixels(path, array) for path in images]
        size, parts = identity.batch_size, [np.empty((0, *array.shape), np.float32)]
        for start in range(0, len(images), size):
            parts.append(encode_padded(encoder, pixels_NYX3[start : start + size], size))
        return round_to_dtype(np.concatenate(parts), images, array)

    return encode


def image_config(array: ArraySpec) -> ImageConfig:
    """Return the config of the array's image recipe; raise ConfigError if this version does not know the recipe."""
    if array.image is None:
        raise ConfigError("the cache was made from texts, so no image can be encoded as its samples were")
    if array.image.clip:
        raise ConfigError("the cache holds clips of videos, so no image can be encoded as its samples were")
    if array.image.buckets:
        raise ConfigError("the cache holds images of several sizes; a single image is encoded only for caches of one")
    known = {name: getattr(array.image, name) for name in RECIPE_FIELDS}
    try:
        config = msgspec.convert(known, ImageConfig, strict=True)
        if config.recipe == array.image:
            return config
    except (msgspec.ValidationError, ConfigError):
        pass
    raise ConfigError("this version of precompute cannot follow the cache's image recipe")


def refuse_wrong_model(array: ArraySpec, encoder: Encoder, model: str) -> None:
    """Raise StaleError, with a table, if the model is not the one that made the array."""
    if differences := differences_between(msgspec.to_builtins(array.encoder), msgspec.to_builtins(encoder.identity)):
        refuse(f"{model} is not the encoder that made the cache", differences, ["give the model that made it"])


def read_pixels(path: Path | str | Image.Image, array: ArraySpec) -> np.ndarray:
    """Read an image as uint8 [Y, X, 3], fitted for the encoder; raise SourceError if it cannot be decoded."""
    if isinstance(path, Image.Image):
        return to_pixels(path)
    try:
        return to_pixels(fit_image(decode_image(Path(path).read_bytes(), array.images), array.images))
    except Rejected as rejected:
        raise SourceError(f"{path}: {rejected.reason}") from None


def encode_padded(encoder: Encoder, pixels_NYX3: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Encode up to `size` images in a batch of that size: float32 [N, *shape]."""
    batch_NYX3 = np.full((size, *pixels_NYX3[0].shape), MID_GREY, np.uint8)
    batch_NYX3[: len(pixels_NYX3)] = pixels_NYX3
    with encoder_threads():
        return encoder.encode(torch.from_numpy(batch_NYX3))[: len(pixels_NYX3)].cpu().numpy()


@contextmanager
def encoder_threads() -> Iterator[None]:
    """Give torch the number of threads that a build gives its encoder."""
    before = torch.get_num_threads()
    torch.set_num_threads(ENCODER_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def round_to_dtype(samples: np.ndarray, images: Sequence[Path | str | Image.Image], array: ArraySpec) -> np.ndarray:
    """Round as the array does; raise SourceError for an image whose sample is not finite then."""
    rounded = as_read(samples, array.dtype)
    for path, values in zip(images, rounded, strict=True):
        if not np.isfinite(values).all():
            raise SourceError(f"{path}: its latent is not finite in {array.dtype}")
    return rounded
