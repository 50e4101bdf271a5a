"""Read a cache's source images as its encoder saw them, for `cache_store.cache.entry_points`. Needs no torch."""

from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from cache_store.cache.entry_points import ReadImage
from cache_store.errors import SourceError
from cache_store.format.array import ImageRecipe
from cache_store.storage.store import Address
from precompute.config import BuildConfig
from precompute.images.decode import content_sha256, decode_image, silence_decoders
from precompute.images.fit import fit_image
from precompute.images.rejected import Rejected
from precompute.sources import open_source
from precompute.sources.place import planned_place
from precompute.sources.videos import Videos


def open_source_images(cache: Address) -> ReadImage:
    """Open a reader of images, by uri and place, from the cache's recorded source; raise EncodeOnceError if that fails.

    The reader returns the image, upright and fitted to a recipe's size, or a clip's frames, and the file's SHA-256; or
    it raises SourceError.
    """
    built = BuildConfig.of_cache(cache)
    if built.encoder.reads_text:
        raise SourceError("it was made from texts")
    source, videos = open_source(built.source, built.media), Videos()
    silence_decoders()

    def read(
        uri: str, place: dict[str, Any] | None, recipe: ImageRecipe, clip_start: float | None
    ) -> tuple[NDArray[np.uint8], str]:
        found = planned_place(place)
        try:
            if recipe.clip:
                with videos.open(source, uri, found) as stream:
                    return frames_of(stream, clip_start or 0.0, recipe), videos.sha256(source, uri, found, stream)
            data = source.read(uri, found)
            return np.asarray(fit_image(decode_image(data, recipe), recipe)), content_sha256(data)
        except Rejected as rejected:
            raise SourceError(rejected.reason) from None
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror or error}") from None

    return read


def frames_of(stream: BinaryIO, clip_start: float, recipe: ImageRecipe) -> NDArray[np.uint8]:
    """Decode and fit the frames of a clip: [T, Y, X, 3]."""
    from precompute.clips.video import decode_clip  # needs PyAV

    return np.stack([np.asarray(frame) for frame in decode_clip(stream, clip_start, recipe).images])
