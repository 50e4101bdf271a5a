"""Read a cache's source images as its encoder saw them, for `cache_store.cache.entry_points`. Needs no torch."""

from typing import Any

from PIL import Image

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


def open_source_images(cache: Address) -> ReadImage:
    """Open a reader of images, by uri and place, from the cache's recorded source; raise EncodeOnceError if that fails.

    The reader returns the image, upright and fitted to a recipe's size, and its SHA-256; or it raises SourceError.
    """
    built = BuildConfig.of_cache(cache)
    if built.encoder.reads_text:
        raise SourceError("it was made from texts")
    source = open_source(built.source)
    silence_decoders()

    def read(uri: str, place: dict[str, Any] | None, recipe: ImageRecipe) -> tuple[Image.Image, str]:
        try:
            data = source.read(uri, planned_place(place))
            return fit_image(decode_image(data, recipe), recipe), content_sha256(data)
        except Rejected as rejected:
            raise SourceError(rejected.reason) from None
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror or error}") from None

    return read
