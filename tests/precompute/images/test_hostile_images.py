"""Files made to break a decoder: each ends as an image or a rejection, in bounded memory and steps."""

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

from precompute.images.decode import MEMORY_AT_LEAST, MEMORY_PER_PIXEL, SUFFIXES_OF, silence_decoders
from precompute.images.fit import unreduced
from precompute.images.rejected import Rejected
from tests.precompute.images import hostile_images as hostile
from tests.precompute.images.fitting import FITS, fitted, recipe_of
from tests.precompute.images.fitting import decoded as decode

MAX_PIXELS = hostile.HEAVY_PIXELS[0] * hostile.HEAVY_PIXELS[1]

RECIPE = recipe_of(max_pixels=MAX_PIXELS)

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")  # as `silence_decoders` does in a build

CORPUS, FUZZED = hostile.fuzz_corpus(), 6_000


def decoded(data: bytes) -> np.ndarray | str:
    """Return the pixels, or the reason why the file was rejected."""
    try:
        return np.asarray(decode(data, RECIPE).rgb)
    except Rejected as rejected:
        return rejected.reason


@pytest.mark.slow
def test_damaged_files_of_every_format_are_images_or_rejections(capfd):
    rng, reasons = np.random.default_rng(0), list[str]()
    recipes = [recipe_of(16, 24, fit=fit) for fit in FITS]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        silence_decoders()
        for number in range(FUZZED):
            end = decoded(hostile.mutated(CORPUS, rng))
            if isinstance(end, str):
                reasons.append(end)
            else:
                assert fitted(unreduced(Image.fromarray(end)), recipes[number % 3]).size == (24, 16)
    assert FUZZED // 10 < len(reasons) < FUZZED * 9 // 10
    assert not any("\n" in reason or "0x" in reason for reason in reasons), "addresses would differ between runs"
    assert capfd.readouterr() == ("", "")  # libtiff would, from C


@pytest.mark.parametrize("data", CORPUS, ids=lambda data: data[:4].hex())
def test_what_is_fuzzed_is_sound_and_cut_never_ends_in_grey(data):
    whole = decoded(data)
    assert not isinstance(whole, str)
    for length in range(0, len(data), max(1, len(data) // 40)):
        end = decoded(data[:length])
        assert isinstance(end, str) or np.array_equal(end, whole), length


WATCHED = """
import resource, sys
from pathlib import Path
from precompute.images.decode import silence_decoders
from precompute.images.rejected import Rejected
from tests.precompute.images.fitting import decoded, fitted, recipe_of

recipe = recipe_of(max_pixels=int(sys.argv[1]))

def end_of(name):
    try:
        fitted(decoded(Path(name).read_bytes(), recipe), recipe)
        return "image"
    except Rejected as rejected:
        return rejected.reason

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

silence_decoders()
first = [end_of(name) for name in sys.argv[2].split()]  # decoders loaded
before = peak()
for name in sys.argv[3:]:
    end = end_of(name)
    print(peak() - before, end)
"""

PROGRAM_BYTES, PIXEL_BYTES = 2**30, MEMORY_PER_PIXEL * MAX_PIXELS
"""Generous address space of Python with Pillow, numpy and their libraries; and the most that an image may take."""


def assert_each_ends(
    folder: Path, makers: dict[str, Callable[[], bytes]], ends: tuple[str, ...], more: int = 0
) -> None:
    """Check each file's end, and that it takes at most `more` bytes, some for each of its own and MEMORY_AT_LEAST.

    One child process decodes all of them, with limits on its address space and on its processor time (a minute).
    """
    sound = {f"sound.{each}": hostile.save(hostile.small(), each) for each in SUFFIXES_OF}
    files = dict(sorted(((name, make()) for name, make in makers.items()), key=lambda each: len(each[1])))
    for name, data in (sound | files).items():
        (folder / name).write_bytes(data)
    bounds = [more + 2 * len(data) + MEMORY_AT_LEAST for data in files.values()]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (PROGRAM_BYTES + max(bounds),) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    paths = [str(folder / name) for name in files]
    command = [sys.executable, "-c", WATCHED, str(MAX_PIXELS), " ".join(str(folder / name) for name in sound), *paths]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for name, bound, line in zip(files, bounds, done.stdout.splitlines(), strict=True):
        peak, end = line.split(maxsplit=1)
        assert end.startswith(ends), (name, end)
        assert int(peak) <= bound, (name, peak)


def test_bombs_of_every_format_are_refused_in_little_memory(tmp_path):
    """Among them the largest sizes that each format can declare."""
    assert_each_ends(tmp_path, hostile.REFUSED, ("too large", "too many parts", "cannot decode"))


@pytest.mark.slow
def test_the_largest_images_stay_within_the_promised_memory(tmp_path):
    assert_each_ends(tmp_path, hostile.HEAVY, ("image",), more=PIXEL_BYTES)


def test_what_is_refused_in_excess_is_read_in_ordinary_amounts():
    strips = {273: (4, 2_000, bytes(8_000)), 278: (3, 1, 1), 279: (4, 2_000, b"\1\0\0\0" * 2_000)}
    for data in (
        hostile.png(8, 8, hostile.png_chunk(b"prVt", b"private") * 1_000),
        hostile.save(hostile.small(), "PNG", icc_profile=bytes(300_000)),
        hostile.jpeg_scans(20),
        hostile.save(hostile.small("P"), "GIF", comment=bytes([1]) * 100_000),
        hostile.grey_tiff(1, 2_000, strips),
    ):
        assert not isinstance(decoded(data), str)
