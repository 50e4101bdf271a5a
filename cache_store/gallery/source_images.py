"""The images that a cache was made from, read by the package that knows its sources.

`cache_store` knows no sources. A package that does (`precompute`) names, in the entry point group `encode_once.images`,
a function from a cache's store to a reader of its images by uri.
"""

from collections.abc import Callable
from importlib.metadata import entry_points

from PIL import Image

from cache_store.errors import SourceError
from cache_store.storage.store import Store

GROUP = "encode_once.images"

ReadImage = Callable[[str], tuple[Image.Image, str]]
"""From a uri to the image as the encoder saw it, and the SHA-256 of its file; SourceError where there is none."""

OpenImages = Callable[[Store], ReadImage]
"""From a cache's store to a reader; EncodeOnceError where the sources cannot be had."""


def find_source_images(store: Store) -> ReadImage:
    """Open a reader of a cache's source images; EncodeOnceError says why there is none."""
    opener = next((entry for entry in entry_points(group=GROUP)), None)
    if opener is None:
        raise SourceError("no installed package reads sources; install precompute to see them")
    try:
        open_images: OpenImages = opener.load()
    except ImportError as error:
        raise SourceError(f"{opener.value} cannot be loaded here: {error}") from None
    return open_images(store)
