"""A cache's source images as its encoder saw them, for programs that know only the cache; needs no torch.

`cache_store.gallery` finds `open_source_images` by the entry point group `encode_once.images`.
"""

from collections.abc import Mapping
from typing import Any

from PIL import Image

from cache_store.errors import SourceError
from cache_store.gallery.source_images import ReadImage
from precompute.images import ImageConfig, content_sha256, decode_image, fit_image, ignore_decoder_warnings
from precompute.rejects import Rejected
from precompute.sources import SourceConfig, open_source


def open_source_images(config: Mapping[str, Any]) -> ReadImage:
    """A reader by uri, from the config that `build.json` keeps; EncodeOnceError where the source cannot be had.

    What it reads is upright and fitted to the recipe's size; SourceError says why there is no image.
    """
    try:
        source = open_source(SourceConfig(**config["source"]))
        recipe = ImageConfig(**config["image"]).recipe
    except (KeyError, TypeError) as error:
        raise SourceError(f"build.json holds no config of this version: {error}") from None
    ignore_decoder_warnings()

    def read(uri: str) -> tuple[Image.Image, str]:
        try:
            data = source.read(uri)
            return fit_image(decode_image(data, recipe.max_pixels), recipe), content_sha256(data)
        except Rejected as rejected:
            raise SourceError(rejected.reason) from None
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror or error}") from None

    return read
