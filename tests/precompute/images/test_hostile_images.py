"""Files that are made to break a decoder: every one ends as an image or as a rejection, in bounded memory."""

import itertools
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from precompute.images.decode import (
    MEMORY_AT_LEAST,
    MEMORY_PER_PIXEL,
    RESAMPLING,
    ImageConfig,
    decode_image,
    fit_image,
    to_pixels,
)
from precompute.images.decoder_messages import silence_decoders
from precompute.images.rejected import Rejected
from tests.precompute.images.hostile_images import (
    HEAVY,
    HEAVY_PIXELS,
    REFUSED,
    fuzz_corpus,
    grey_tiff,
    jpeg_of_size,
    jpeg_scans,
    mutated,
    png,
    png_chunk,
    save,
    small,
)

MAX_PIXELS = HEAVY_PIXELS[0] * HEAVY_PIXELS[1]

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")  # as `silence_decoders` does in a build

FUZZED = 6_000

RECIPES = [ImageConfig(height=16, width=24, fit=fit).recipe for fit in ("squash", "crop", "pad")]


def decoded(data: bytes) -> Image.Image | str:
    """The image, or why it was rejected."""
    try:
        return decode_image(data, MAX_PIXELS)
    except Rejected as rejected:
        return rejected.reason


def test_damaged_files_of_every_format_are_images_or_rejections(capfd):
    rng, corpus = np.random.default_rng(0), list(fuzz_corpus())
    ends = {"image": 0, "rejected": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        silence_decoders()
        for number in range(FUZZED):
            data = mutated(corpus, rng)
            end = decoded(data)
            if isinstance(end, str):
                assert "\n" not in end
            else:
                assert to_pixels(fit_image(end, RECIPES[number % 3])).shape == (16, 24, 3)
            ends["rejected" if isinstance(end, str) else "image"] += 1
    assert min(ends.values()) > FUZZED // 10, ends
    assert capfd.readouterr() == ("", "")  # libtiff would, from C


@pytest.mark.parametrize("data", list(fuzz_corpus()), ids=lambda data: data[:4].hex())
def test_what_is_fuzzed_is_sound_and_cut_never_ends_in_grey(data):
    whole = to_pixels(decode_image(data, MAX_PIXELS))
    for length in range(0, len(data), max(1, len(data) // 40)):
        end = decoded(data[:length])
        if not isinstance(end, str):
            np.testing.assert_array_equal(to_pixels(end), whole)


WATCHED = """
import resource, sys, threading
from pathlib import Path
from precompute.images.decoder_messages import silence_decoders
from precompute.images.decode import ImageConfig, decode_image, fit_image, to_pixels
from precompute.images.rejected import Rejected

silence_decoders()
paths, max_pixels = [Path(name) for name in sys.argv[2:]], int(sys.argv[1])

def decode(path, max_pixels):
    data = path.read_bytes()
    try:
        to_pixels(fit_image(decode_image(data, max_pixels), ImageConfig().recipe))
        return "image"
    except Rejected as rejected:
        return rejected.reason

for path in paths:
    decode(path, 0)  # decoders loaded
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in paths:
    print(path.name, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, decode(path, max_pixels))
print("all", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, "done")
"""


def watched(paths: list[Path], memory_bytes: int) -> list[tuple[int, str]]:
    """Bytes of memory beyond the program's own, and the end of it, for each file: decoded in one child process.

    The child could have no more address space, or a minute of processor time, for all files together.
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    command = [sys.executable, "-c", WATCHED, str(MAX_PIXELS), *map(str, paths)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    return [(int(peak), end) for (_, _, end), (_, peak, _) in itertools.pairwise(lines)]


PROGRAM_BYTES = 2**30
"""Address space of Python with Pillow, numpy and their libraries, generously."""

PIXEL_BYTES = MEMORY_PER_PIXEL * MAX_PIXELS


def assert_each_ends(folder: Path, makers: dict[str, Callable[[], bytes]], ends: tuple[str, ...], more: int) -> None:
    """In no more memory than the program needs for any file, `more`, and twice the file."""
    sizes = [(folder / f"{number}").write_bytes(make()) for number, make in enumerate(makers.values())]
    bound = 2 * max(sizes) + MEMORY_AT_LEAST
    found = watched([folder / f"{number}" for number in range(len(sizes))], PROGRAM_BYTES + PIXEL_BYTES + bound)
    for name, (peak, end) in zip(makers, found, strict=True):
        assert end.startswith(ends), (name, end)
        assert peak <= more + bound, (name, peak)


def test_bombs_of_every_format_are_refused_in_little_memory(tmp_path):
    assert_each_ends(tmp_path, REFUSED, ("too large", "too many parts", "cannot decode"), more=0)


def test_the_largest_images_stay_within_the_promised_memory(tmp_path):
    assert_each_ends(tmp_path, HEAVY, ("image",), more=PIXEL_BYTES)


def test_what_is_refused_in_excess_is_read_in_ordinary_amounts():
    for data in (
        png(8, 8, png_chunk(b"prVt", b"private") * 1_000),
        save(small(), "PNG", icc_profile=bytes(300_000)),
        jpeg_scans(20),
        jpeg_of_size(9, 11),
        save(small("P"), "GIF", comment=bytes([1]) * 100_000),
        grey_tiff(1, 2_000, {273: (4, 2_000, bytes(8_000)), 278: (3, 1, 1), 279: (4, 2_000, b"\1\0\0\0" * 2_000)}),
    ):
        assert not isinstance(decoded(data), str), decoded(data)


def test_an_image_made_rgb_in_strips_is_as_one_made_at_once(monkeypatch):
    image = small("RGBA").resize((40, 50))
    data = [save(image, "PNG"), save(image.convert("P"), "PNG", transparency=3), save(small("I;16"), "PNG")]
    at_once = [to_pixels(decode_image(each, MAX_PIXELS)) for each in data]
    monkeypatch.setattr("precompute.images.rgb.STRIP_PIXELS", 100)
    for each, expected in zip(data, at_once, strict=True):
        np.testing.assert_array_equal(to_pixels(decode_image(each, MAX_PIXELS)), expected)


@pytest.mark.parametrize("resample", RESAMPLING)
@pytest.mark.parametrize("fit", ["squash", "crop", "pad"])
def test_the_thinnest_images_fit(fit, resample):
    recipe = ImageConfig(height=64, width=48, fit=fit, resample=resample).recipe
    for size in [(1, 100_000), (100_000, 1), (1, 1), (3, 7)]:
        assert fit_image(Image.new("RGB", size), recipe).size == (48, 64)
