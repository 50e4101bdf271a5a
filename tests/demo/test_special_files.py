"""Broken files are broken, and unusual ones hold the same scene as a plain file would."""

import io

import numpy as np
import pytest
from PIL import Image

from demo.scenes import Scene, compose, draw
from demo.special_files import BROKEN, ORIENTATION_TAG, UNUSUAL, suited
from precompute.images.decode import ImageConfig, decode_image
from precompute.images.rejected import Rejected

MAX_PIXELS = ImageConfig().max_pixels


def written(kind: str) -> tuple[Scene, bytes]:
    special = (BROKEN | UNUSUAL)[kind]
    scene = suited(compose(0, 11), special)
    data = special.write(scene)
    assert data is not None
    return scene, data


@pytest.mark.parametrize("kind", sorted(BROKEN))
def test_broken_files_are_rejected_and_one_is_missing(kind):
    if kind == "missing":
        assert BROKEN[kind].write(compose(0, 11)) is None
    else:
        with pytest.raises(Rejected):
            decode_image(written(kind)[1], MAX_PIXELS)


def test_unusual_jpegs_show_the_scene():
    for kind in ("exif-rotated", "cmyk"):
        scene, data = written(kind)
        shown, drawn = (np.asarray(image, float) for image in (decode_image(data, MAX_PIXELS), draw(scene)))
        assert abs(shown - drawn).mean() < 8
    assert Image.open(io.BytesIO(data)).mode == "CMYK"
    scene, data = written("exif-rotated")
    stored = Image.open(io.BytesIO(data))
    assert stored.getexif()[ORIENTATION_TAG] == 6
    assert abs(np.asarray(stored, float) - np.asarray(draw(scene), float)).mean() > 20, "it is stored lying"


def test_the_grey_file_has_16_bits_and_shows_the_scene():
    scene, data = written("grey-16-bit")
    assert Image.open(io.BytesIO(data)).mode == "I;16"
    shown = decode_image(data, MAX_PIXELS)
    assert np.array_equal(np.asarray(shown.convert("L")), np.asarray(draw(scene).convert("L")))


def test_the_palette_files_transparent_ground_shows_as_white():
    scene, data = written("palette-transparent")
    stored = Image.open(io.BytesIO(data))
    assert stored.mode == "P"
    assert stored.has_transparency_data
    shown = np.asarray(decode_image(data, MAX_PIXELS))
    assert (shown[0, 0] == 255).all()
    for thing in (scene.first, scene.second):
        words = {"red": [214, 40, 40], "blue": [40, 80, 210]}
        assert (abs(shown.astype(int) - words[thing.colour]).sum(-1) < 60).sum() > 100
