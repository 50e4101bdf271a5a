"""Writing the pixels of Pillow's images into batches, in C and without."""

import runpy
import shutil
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precompute.images import pixels
from precompute.images.pixels import write_pixels, write_pixels_by_pillow

CELLS = [(1, 1), (8, 8), (16, 16), (3, 5), (7, 1), (1, 256)]
"""Height and width of a cell, in pixels."""
HEADERS = Path(sysconfig.get_path("include"), "Python.h")
IS_IN_C = write_pixels is not write_pixels_by_pillow


def random_image(height: int, width: int) -> Image.Image:
    rng = np.random.default_rng(height * width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_pixels_and_means_are_those_of_pillow(cell):
    """Nothing else of the batch is written, for images of one cell and of several."""
    for rows, columns in ((1, 1), (4, 3)):
        image = random_image(cell[0] * rows, cell[1] * columns)
        written = []
        for write in (write_pixels, write_pixels_by_pillow):
            batch, previews = (np.full((3, *size, 3), 7, np.uint8) for size in (image.size[::-1], (rows, columns)))
            write(image, batch[1], previews[1])
            written.append((batch, previews))
        for one, other, middle in zip(*written, (image, image.reduce(cell[::-1])), strict=True):
            np.testing.assert_array_equal(one[1], np.asarray(middle))
            np.testing.assert_array_equal(one, other)
            assert (one[::2] == 7).all()


def test_an_image_of_several_blocks_is_written_too():
    """Pillow lends no image of more than 16 MiB."""
    image, batch = random_image(2_052, 2_048), np.zeros((2_052, 2_048, 3), np.uint8)
    with pytest.raises(ValueError, match="not contiguous"):
        image.__arrow_c_array__()
    write_pixels(image, batch, None)
    np.testing.assert_array_equal(batch, np.asarray(image))


@pytest.mark.skipif(not IS_IN_C, reason="no C compiler")
def test_wrong_buffers_are_refused_unwritten():
    from precompute.images._pixels import copy_pixels, mean_pixels

    batch, image = np.full((16, 24, 3), 7, np.uint8), random_image(16, 24)
    lent = image.__arrow_c_array__()[1]
    read_only = np.frombuffer(bytes(batch.size), np.uint8).reshape(batch.shape)
    for out in (batch[:15], batch[:, :23], read_only):
        with pytest.raises((ValueError, TypeError)):
            copy_pixels(lent, out)
    for capsule in (None, image.__arrow_c_array__()[0], image.convert("L").__arrow_c_array__()[1]):
        with pytest.raises(ValueError, match="PyCapsule|out must hold"):
            copy_pixels(capsule, batch)
    tall = np.zeros((514, 8, 3), np.uint8)
    uneven = [(batch, shape) for shape in ((3, 3, 3), (2, 5, 3), (2, 3, 1), (0, 3, 3))]
    for source, shape in (*uneven, (tall, (2, 1, 3))):
        with pytest.raises(ValueError, match="cut evenly"):
            mean_pixels(source, np.zeros(shape, np.uint8))
    for source, means in ((batch, read_only), (batch.astype(np.uint16), batch), (batch[:, ::2], batch)):
        with pytest.raises((ValueError, BufferError)):
            mean_pixels(source, means)
    assert (batch == 7).all()


@pytest.mark.skipif(shutil.which("cc") is None or not HEADERS.exists(), reason="no C compiler, or no Python headers")
def test_where_there_is_a_compiler_pixels_are_written_in_c():
    assert IS_IN_C


def test_pillow_writes_pixels_where_no_binary_loads(monkeypatch):
    monkeypatch.setitem(sys.modules, "precompute.images._pixels", None)
    assert runpy.run_path(pixels.__file__)["write_pixels"].__name__ == "write_pixels_by_pillow"
