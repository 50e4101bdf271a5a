"""Writing the pixels and the previews of images into batches."""

import numpy as np
import pytest
from PIL import Image

from precompute.images.pixels import write_pixels

CELLS = [(1, 1), (8, 8), (16, 16), (3, 5), (7, 1), (1, 256)]
"""Height and width of a cell, in pixels."""


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_pixels_and_means_are_those_of_pillow(cell):
    """Nothing else of the batch is written, for images of one cell and of several."""
    for rows, columns in ((1, 1), (4, 3)):
        size = (cell[0] * rows, cell[1] * columns)
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8))
        batch, previews = (np.full((3, *each, 3), 7, np.uint8) for each in (size, (rows, columns)))
        write_pixels(image, batch[1], previews[1])
        for written, expected in ((batch, image), (previews, image.reduce(cell[::-1]))):
            np.testing.assert_array_equal(written[1], np.asarray(expected))
            assert (written[::2] == 7).all()
