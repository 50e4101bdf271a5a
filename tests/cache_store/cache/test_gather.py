"""Copying rows out of mapped files, in C and in Python."""

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from array import array
from pathlib import Path

import numpy as np
import pytest

from cache_store.cache import gather
from cache_store.cache.gather import AHEAD, COLD_PART, FIRST_AHEAD, ReadAhead, copy_rows, move_rows, read_ahead

IN_C = [copy_rows] if copy_rows is not move_rows else []
"""The function in C, if there was a compiler."""
ALL = [*IN_C, move_rows]
GUARD = 64


@pytest.mark.parametrize("copy", ALL)
@pytest.mark.parametrize("row_bytes", [1, 63, 64, 65, 4_096, 12_287, 12_288, 12_289, 12_353, 25_088, 131_072])
def test_rows_from_any_addresses_lie_in_the_buffer_alone(copy, row_bytes):
    rng = np.random.default_rng(row_bytes)
    source = rng.integers(0, 256, 2 * row_bytes + 999, np.uint8)
    for rows in (0, 1, 2, 7):
        offsets = rng.integers(0, len(source) - row_bytes + 1, rows)
        around = np.full(GUARD + rows * row_bytes + GUARD, 7, np.uint8)
        out = around[GUARD : GUARD + rows * row_bytes].reshape(rows, row_bytes)
        copy(out, offsets + source.ctypes.data, row_bytes)
        for row, offset in zip(out, offsets, strict=True):
            np.testing.assert_array_equal(row, source[offset : offset + row_bytes])
        assert (around[:GUARD] == 7).all()
        assert (around[GUARD + rows * row_bytes :] == 7).all()


@pytest.mark.parametrize("copy", ALL)
def test_nothing_behind_the_last_row_of_a_file_is_touched(copy, tmp_path):
    """Nothing is mapped behind the three pages, so reading one byte more would kill the process."""
    size, row_bytes = 3 * mmap.PAGESIZE, 1_500
    (tmp_path / "file").write_bytes(np.arange(size).astype(np.uint8).tobytes())
    with (tmp_path / "file").open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        start = np.frombuffer(mapped, np.uint8).ctypes.data
        out = np.empty((3, row_bytes), np.uint8)
        copy(out, np.full(3, start + size - row_bytes), row_bytes)
        assert all(row.tobytes() == mapped[size - row_bytes :] for row in out)


@pytest.mark.parametrize("copy", IN_C)
def test_wrong_buffers_are_refused_unwritten_and_all_let_go(copy):
    out, addresses = np.full((2, 8), 7, np.uint8), np.zeros(2, np.int64)
    read_only, with_gaps = np.frombuffer(bytes(16), np.uint8), np.zeros((2, 9), np.uint8)[:, :8]
    wrong = [(each, addresses, 8) for each in (read_only, with_gaps)] + [(out[:0], addresses[:1], 8)]
    wrong += [(out, np.zeros(count, np.int64), 8) for count in (1, 3)] + [(out, np.zeros(17, np.uint8), 8)]
    for arguments in wrong + [(out, addresses, size) for size in (7, 9, 0, -8, 2**62)]:
        with pytest.raises((ValueError, BufferError, TypeError)):
            copy(*arguments)
        assert (out == 7).all()
    held, addresses = bytearray(8), array("q", [out.ctypes.data])
    copy(held, addresses, 8)
    with pytest.raises(ValueError, match="one row"):
        copy(held, addresses, 7)
    held.append(0)  # a BufferError while anyone holds it
    addresses.append(0)


def pages_in_memory(mapped):
    seen = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
    address = ctypes.c_void_p(np.frombuffer(mapped, np.uint8).ctypes.data)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), seen) == 0
    return {page for page, there in enumerate(seen) if there & 1}


def test_the_pages_of_all_rows_are_read_ahead_and_no_others(tmp_path):
    pages, page = 4_096, mmap.PAGESIZE
    with (tmp_path / "file").open("wb") as stream:
        stream.write(bytes(pages * page))
        stream.flush()
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with (tmp_path / "file").open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        if pages_in_memory(mapped):
            pytest.skip("needs a file system whose files leave memory")
        read_ahead(
            np.frombuffer(mapped, np.uint8).ctypes.data + np.array([5, 1_000 * page - 1, 2_000 * page]), 2 * page
        )
        wanted = {0, 1, 2, 999, 1_000, 1_001, 2_000, 2_001}
        give_up = time.monotonic() + 60
        while not wanted <= pages_in_memory(mapped) and time.monotonic() < give_up:
            time.sleep(0.001)
        assert pages_in_memory(mapped) == wanted


class Disk:
    """Reads batches of 256 rows; some rows wait for the disk unless they are read ahead. No address is touched."""

    def __init__(self):
        self.waits, self.ahead = 0, []
        self.reader = ReadAhead(lambda: self.waits, lambda addresses, lengths: self.ahead.append(len(addresses)))

    def batches(self, count, waiting_rows):
        """Return for each of `count` batches whether it was read ahead."""
        return [self._batch(waiting_rows) for _ in range(count)]

    def _batch(self, waiting_rows):
        before = len(self.ahead)
        with self.reader.batch(np.zeros(256, np.int64), 100):
            is_ahead = len(self.ahead) > before
            self.waits += 0 if is_ahead else waiting_rows
        return is_ahead


def test_batches_are_read_ahead_while_rows_wait_for_the_disk():
    disk = Disk()
    first, few = [True] * FIRST_AHEAD, 256 // COLD_PART
    assert disk.batches(FIRST_AHEAD + 100, few) == [*first, *[False] * 100], "a few that wait cost less"
    assert disk.batches(2 * AHEAD + 2, few + 1) == [False, *[True] * AHEAD, False, *[True] * AHEAD]
    assert not any(disk.batches(100, 0)), "and none is read ahead once they are in memory"


HEADERS = Path(sysconfig.get_path("include"), "Python.h")


@pytest.mark.skipif(shutil.which("cc") is None or not HEADERS.exists(), reason="no C compiler, or no Python headers")
def test_where_there_is_a_compiler_the_copying_is_in_c():
    assert IN_C


@pytest.mark.parametrize("binary", [b"", b"of another machine"])
def test_a_binary_that_does_not_load_is_done_without(tmp_path, binary):
    room = tmp_path / "cache_store" / "cache"
    room.mkdir(parents=True)
    for folder in (room, room.parent):
        (folder / "__init__.py").touch()
    shutil.copy(gather.__file__, room)
    (room / "_gather.abi3.so").write_bytes(binary)
    program = "from cache_store.cache.gather import copy_rows, move_rows; print(copy_rows is move_rows)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
