"""Long runs of one byte or of two: whatever repeats in a file, it is decided in a bounded number of steps."""

import contextlib
import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from precompute.decoder_messages import silence_decoders
from precompute.image_parts import JPEG_MARKER, PARTS, refuse_costly
from precompute.images import decode_image
from precompute.rejects import Rejected
from precompute.sources.image_tar import LONG_NUMBER
from tests.precompute.hostile_images import jpeg_with, save, small
from trainer.chat import IMAGE_MARKER

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
    monkeypatch.setattr("precompute.image_parts.MAX_PARTS", FEW_PARTS)


@pytest.mark.parametrize("magic", PARTS, ids=bytes.hex)
def test_parts_of_any_run_are_counted_in_bounded_steps(few_parts, magic):
    for run in INTERESTING:
        assert calls(refuse_costly, magic + run * (RUN // len(run)), MAX_PIXELS) <= 10 * FEW_PARTS, run


@pytest.mark.parametrize("magic", {parts: magic for magic, parts in PARTS.items()}.values(), ids=bytes.hex)
def test_every_pair_of_bytes_is_passed_in_no_more_steps_than_bytes(magic):
    """A loop that does not move on shows in 20 bytes as well as in a million."""
    for pair in itertools.product(range(256), repeat=2):
        data = magic + bytes(pair) * 10
        with contextlib.suppress(Rejected):
            assert sum(1 for _ in PARTS[magic](data, MAX_PIXELS)) <= len(data), pair


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


@pytest.mark.parametrize("pattern", [JPEG_MARKER, LONG_NUMBER], ids=lambda pattern: pattern.pattern.decode())
def test_a_pattern_searched_in_files_has_a_bounded_width(pattern):
    """So a search takes at most that many steps a byte; a repeat without a bound can begin anew at every byte."""
    assert re._parser.parse(pattern.pattern, pattern.flags).getwidth()[1] <= 100


def test_blanks_before_an_image_marker_are_tried_once_a_run():
    """What repeats without a bound, blanks, cannot begin behind one of them."""
    (kind, (direction, behind)), (repeat, (_, _, repeated)), *rest = re._parser.parse(IMAGE_MARKER.pattern)
    assert (kind, direction, repeat) == (re._constants.ASSERT_NOT, -1, re._constants.MAX_REPEAT)
    assert str(behind) == str(repeated)
    assert all(part[0] != re._constants.MAX_REPEAT or part[1][1] == 1 for part in rest)
