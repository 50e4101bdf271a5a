"""Refuse MP4 and QuickTime files whose tables claim many samples: FFmpeg indexes them all when it opens a file.

Four bytes can claim billions. Tables are searched by their names, wherever they lie, because FFmpeg accepts boxes in
many places.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO

from precompute.images.rejected import Rejected

KIND = "too many parts"

MAX_SAMPLES = 2_000_000
"""Most samples of all tracks: 9 hours of video at 60 frames per second. FFmpeg takes up to 70 bytes for each."""
MAX_TABLES = 64 * 2**20
"""Bytes of all boxes besides the samples themselves."""
MAX_BOXES = 100_000
"""At the top level; a fragmented file has two for each of its fragments."""

OTHER_CONTAINERS = (b"RIFF", b"\x1a\x45\xdf\xa3")
"""First bytes of AVI and Matroska, in which each sample takes bytes of its own."""

FARTHEST = 2**62
"""An offset in no file, to which files cannot seek."""

PASSED_OVER = frozenset({b"mdat", b"free", b"skip"})
"""Boxes in which FFmpeg looks for no others."""

NUM_SAMPLES = re.compile(rb"stsz.{8}(.{4})|stz2.{8}(.{4})|trun.{4}(.{4})", re.DOTALL)
DURATIONS = re.compile(rb"stts.{4}(.{4}).{4}(.{4})", re.DOTALL)
"""Number of entries, and the first one's duration."""
ONE = (1).to_bytes(4, "big")


def refuse_claims(file: BinaryIO) -> None:
    """Raise Rejected for a file that FFmpeg would index at a high cost."""
    num_bytes = num_samples = 0
    for num_boxes, (size, name) in enumerate(boxes(file)):
        if num_boxes == MAX_BOXES:
            raise Rejected(KIND, f"the file has more than {MAX_BOXES:,} boxes")
        if name in PASSED_OVER:
            continue
        content = file.read(min(size, MAX_TABLES))
        num_bytes += len(content)
        if num_bytes >= MAX_TABLES:
            raise Rejected(KIND, f"the file's tables have {MAX_TABLES:,} bytes or more")
        if b"cmov" in content:
            raise Rejected("cannot decode", "the tables are compressed, as in old QuickTime files")
        num_samples += sum(map(claimed_samples, content.split(b"trak")))
        if num_samples > MAX_SAMPLES:
            raise Rejected(KIND, f"the file's tables claim more than {MAX_SAMPLES:,} samples")


def boxes(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield size and name of each box at the top level; the file is at its content."""
    place = 0
    while True:
        file.seek(place)
        head = file.read(16)
        if len(head) < 8 or head.startswith(OTHER_CONTAINERS):
            return
        size, length = int.from_bytes(head[:4], "big"), 8
        if size == 1:
            size, length = int.from_bytes(head[8:], "big"), 16
        file.seek(place + length)
        if 0 < size < length or place + size >= FARTHEST:
            return
        yield (size - length if size else MAX_TABLES), head[4:8]
        if not size:  # the box lasts until the file ends
            return
        place += size


def claimed_samples(track: bytes) -> int:
    """Return how many samples the tables of a track claim; of uncompressed sound FFmpeg indexes none singly."""
    durations = DURATIONS.findall(track)
    if b"soun" in track and durations and all(each == (ONE, ONE) for each in durations):
        return 0
    return sum(int.from_bytes(b"".join(groups), "big") for groups in NUM_SAMPLES.findall(track))
