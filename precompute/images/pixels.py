"""Write the pixels of a fitted image into a batch, and its preview, the mean colour of each cell.

This runs in C if there was a compiler when the package was installed; with Pillow alone it costs another twentieth of
the time to decode a 500 x 375 photograph. Both ways give the same bytes.
"""

# Axes: Y X pixels, h w cells of a preview, 3 RGB.

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from precompute.images.fit import to_pixels

Bands = NDArray[np.uint8]


def write_pixels_by_pillow(image: Image, pixels_YX3: Bands, preview_hw3: Bands | None) -> None:
    pixels_YX3[:] = to_pixels(image)
    if preview_hw3 is not None:
        height, width = preview_hw3.shape[:2]
        preview_hw3[:] = to_pixels(image.reduce((image.width // width, image.height // height)))


def write_pixels_in_c(image: Image, pixels_YX3: Bands, preview_hw3: Bands | None) -> None:
    try:
        _, lent = image.__arrow_c_array__()
    except ValueError:  # it is larger than one of Pillow's blocks of memory, 16 MiB
        write_pixels_by_pillow(image, pixels_YX3, preview_hw3)
        return
    copy_pixels(lent, pixels_YX3)
    if preview_hw3 is not None:
        mean_pixels(pixels_YX3, preview_hw3)


try:
    from precompute.images._pixels import copy_pixels, mean_pixels

    write_pixels = write_pixels_in_c
except ImportError:  # not built, or built for another machine
    write_pixels = write_pixels_by_pillow
