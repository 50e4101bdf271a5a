"""Long runs of one byte or of two: whatever repeats in a file, it is decided in a bounded number of steps."""

import contextlib
import itertools
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_store.errors import SourceError
from precompute.images.box_parts import FRAMES
from precompute.images.decode import TGA, decode_image
from precompute.images.decoder_messages import silence_decoders
from precompute.images.netpbm import LONG_VALUE
from precompute.images.parts import JPEG_MARKER, PARTS, refuse_costly
from precompute.images.rejected import Rejected
from precompute.sources.image_store import open_image_store
from precompute.sources.image_tar import LONG_NUMBER
from tests.precompute.images.hostile_images import fuzz_corpus, jpeg_with, save, small
from trainer.text.chat import IMAGE_MARKER

MAX_PIXELS = 10**6

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")  # as `silence_decoders` does in a build


def calls(function: Callable[..., object], *arguments: object) -> int:
    """How many functions were called, of Python and of C, until it returned or rejected."""
    count = itertools.count()

    def step(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            next(count)

    sys.setprofile(step)
    try:
        function(*arguments)
    except Rejected:
        pass
    finally:
        sys.setprofile(None)
    return next(count)


def photo() -> bytes:
    return save(small().resize((64, 64)), "JPEG")


FEW_PARTS, RUN = 500, 20_000
"""With so few parts allowed, a run of so many bytes shows whether the steps follow the bound or the file."""

INTERESTING = [bytes([byte]) for byte in range(256)] + [b"\xff\0", b"\xff\xd0", b"\xff\xfe", b"\0\2", b"\0\0\0\x01"]


@pytest.fixture
def few_parts(monkeypatch):
    monkeypatch.setattr("precompute.images.parts.MAX_PARTS", FEW_PARTS)


MAGICS = [magic if magic != b"ftyp" else bytes(4) + b"ftypavif" for magic in PARTS]

BOXES = [b"\0\0\0\x08iprp", b"\0\0\0\x14metaiprp" + bytes(8), b"\0\0\0\x08meta", b"\xff\x64\0\2"]


@pytest.mark.parametrize("magic", MAGICS, ids=bytes.hex)
def test_parts_of_any_run_are_counted_in_bounded_steps(few_parts, magic):
    for run in [*INTERESTING, *BOXES]:
        assert calls(refuse_costly, magic + run * (RUN // len(run)), MAX_PIXELS) <= 10 * FEW_PARTS, run


@pytest.mark.parametrize(
    ("parts", "magic"),
    dict(zip(PARTS.values(), MAGICS, strict=True)).items(),
    ids=lambda value: getattr(value, "__name__", "after"),
)
def test_every_pair_of_bytes_is_passed_in_as_many_steps(parts, magic):
    """A loop that does not move on shows in 20 bytes as well as in a million."""
    for pair in itertools.product(range(256), repeat=2):
        data = magic + bytes(pair) * 10
        with contextlib.suppress(Rejected):
            assert sum(1 for _ in parts(data, MAX_PIXELS)) <= len(data), pair


RUNS_IN_A_JPEG: dict[str, Callable[[bytes], bytes]] = {
    "at its end": lambda run: photo()[:-400] + run,
    "behind its end": lambda run: photo() + run,
    "before its first segment": jpeg_with,
    "in place of all that follows its magic": lambda run: b"\xff\xd8" + run,
}


@pytest.mark.parametrize("place", RUNS_IN_A_JPEG)
@pytest.mark.parametrize("run", [b"\xff", b"\0", b"\xff\0", b"\xff\xd0"], ids=bytes.hex)
def test_filling_in_a_jpeg_is_decided_in_bounded_steps(few_parts, place, run):
    silence_decoders()
    assert calls(decode_image, RUNS_IN_A_JPEG[place](run * (1_000_000 // len(run))), MAX_PIXELS) <= 10 * FEW_PARTS


HEADS = [data[: len(data) // 2] for data in fuzz_corpus()] + [b"P3\n", b"P6 # ", b"P2 9 9 255\n", b""]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head[:12].hex())
def test_a_run_in_place_of_a_second_half_takes_bounded_steps(few_parts, head):
    silence_decoders()
    for run in (b"\0", b"\xff", b"#", b" ", b"9", b"\n", b"#\n", b"1 ", b"<", b"\0\0\0\x08"):
        assert calls(decode_image, head + run * (100_000 // len(run)), MAX_PIXELS) <= 20 * FEW_PARTS, run


def indexed(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with contextlib.suppress(SourceError):
        open_image_store(path).listing()


@pytest.mark.parametrize("name", ["images.tar", "images.zip"])
def test_an_archive_of_nothing_but_a_run_is_refused_in_few_steps(tmp_path, name):
    for run in INTERESTING:
        assert calls(indexed, tmp_path / name, run * (RUN // len(run))) <= 10 * FEW_PARTS, run


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME], ids=bytes.decode)
def test_a_run_in_a_tars_extended_header_is_refused_in_few_steps(tmp_path, kind):
    header = tarfile.TarInfo("pax")
    header.type, header.size = kind, 10_240
    for run in INTERESTING:
        data = header.tobuf(tarfile.GNU_FORMAT) + (run * header.size)[: header.size]
        assert calls(indexed, tmp_path / "images.tar", data) <= 10 * FEW_PARTS, run


SEARCHED = [JPEG_MARKER, LONG_NUMBER, FRAMES, LONG_VALUE, TGA]


@pytest.mark.parametrize("pattern", SEARCHED, ids=lambda pattern: pattern.pattern.decode())
def test_a_pattern_searched_in_files_has_a_bounded_width(pattern):
    """So a search takes at most that many steps a byte; a repeat without a bound can begin anew at every byte."""
    assert re._parser.parse(pattern.pattern, pattern.flags).getwidth()[1] <= 100


def test_blanks_before_an_image_marker_are_tried_once_a_run():
    """What repeats without a bound, blanks, cannot begin behind one of them."""
    (kind, (direction, behind)), (repeat, (_, _, repeated)), *rest = re._parser.parse(IMAGE_MARKER.pattern)
    assert (kind, direction, repeat) == (re._constants.ASSERT_NOT, -1, re._constants.MAX_REPEAT)
    assert str(behind) == str(repeated)
    assert all(part[0] != re._constants.MAX_REPEAT or part[1][1] == 1 for part in rest)
