"""Rows out of mapped files: in C and without."""

import importlib
import mmap
import shutil
import subprocess
import sys
import sysconfig
from array import array
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache, reader
from cache_store.gather import gather, move_rows
from tests.make_cache import make_cache

module = importlib.import_module("cache_store.gather")
needs_compiled = pytest.mark.skipif(gather is move_rows, reason="installed without a C compiler")
ways = pytest.mark.parametrize("copy", [pytest.param(gather, marks=needs_compiled, id="C"), move_rows])
GUARD = 64


def can_compile() -> bool:
    return shutil.which("cc") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()


@ways
@pytest.mark.parametrize("row_bytes", [1, 63, 64, 65, 4_096, 12_287, 12_288, 12_289, 12_353, 25_088, 131_072])
@pytest.mark.parametrize("rows", [0, 1, 2, 7])
def test_rows_from_any_addresses_lie_in_the_buffer_and_nothing_beside_it_changes(copy, row_bytes, rows):
    rng = np.random.default_rng(row_bytes + rows)
    source = rng.integers(0, 256, 2 * row_bytes + 999, np.uint8)
    offsets = rng.integers(0, len(source) - row_bytes + 1, rows)
    around = np.full(GUARD + rows * row_bytes + GUARD, 7, np.uint8)
    out = around[GUARD : GUARD + rows * row_bytes].reshape(rows, row_bytes)
    copy(out, offsets + source.ctypes.data, row_bytes)
    for row, offset in zip(out, offsets, strict=True):
        np.testing.assert_array_equal(row, source[offset : offset + row_bytes])
    assert (around[:GUARD] == 7).all()
    assert (around[GUARD + rows * row_bytes :] == 7).all()


@ways
def test_the_last_row_of_a_file_is_read_without_touching_what_lies_behind(copy, tmp_path):
    """A mapping of three pages with nothing mapped behind: a read of one byte more would kill the process."""
    size, row_bytes = 3 * mmap.PAGESIZE, 1_500
    (tmp_path / "file").write_bytes(np.arange(size).astype(np.uint8).tobytes())
    with (tmp_path / "file").open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        start = np.frombuffer(mapped, np.uint8).ctypes.data
        out = np.empty((3, row_bytes), np.uint8)
        copy(out, np.full(3, start + size - row_bytes), row_bytes)
        assert all(row.tobytes() == mapped[size - row_bytes :] for row in out)


@needs_compiled
@pytest.mark.parametrize(
    ("rows", "addresses", "row_bytes"),
    [(2, np.zeros(3, np.int64), 8), (2, np.zeros(1, np.int64), 8), (2, np.zeros(2, np.int64), 9)]
    + [(2, np.zeros(2, np.int64), size) for size in (0, -8, 2**62)]
    + [(2, np.zeros(17, np.uint8), 8), (0, np.zeros(1, np.int64), 8)],
)
def test_a_buffer_of_another_size_than_the_rows_is_refused_and_not_written(rows, addresses, row_bytes):
    out = np.full((rows, 8), 7, np.uint8)
    with pytest.raises(ValueError, match="one row"):
        gather(out, addresses, row_bytes)
    assert (out == 7).all()


@needs_compiled
def test_a_buffer_that_is_read_only_or_has_gaps_is_refused():
    source = np.arange(16, dtype=np.uint8)
    addresses = np.full(2, source.ctypes.data)
    with pytest.raises((ValueError, BufferError, TypeError)):
        gather(np.frombuffer(bytes(16), np.uint8), addresses, 8)
    with pytest.raises((ValueError, BufferError, TypeError)):
        gather(np.zeros((2, 9), np.uint8)[:, :8], addresses, 8)


@needs_compiled
def test_buffers_are_let_go_after_the_copy_and_after_a_refusal():
    source, out, addresses = np.arange(16, dtype=np.uint8), bytearray(16), array("q", [0, 0])
    addresses[0] = addresses[1] = source.ctypes.data
    gather(out, addresses, 8)
    with pytest.raises(ValueError, match="one row"):
        gather(out, addresses, 7)
    out.append(0)  # a BufferError while anyone holds it
    addresses.append(0)


@pytest.mark.skipif(not can_compile(), reason="no C compiler, or no Python headers")
def test_where_there_is_a_compiler_the_copying_is_in_c():
    assert gather is not move_rows


@pytest.mark.parametrize("binary", [b"", b"of another machine"])
def test_a_binary_that_does_not_load_leaves_the_copying_without_it(tmp_path, binary):
    package = tmp_path / "cache_store"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(module.__file__, package)
    (package / "_gather.abi3.so").write_bytes(binary)
    program = "from cache_store.gather import gather, move_rows; print(gather is move_rows)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("store_format", ["zarr", "webdataset"])
def test_a_machine_without_a_compiler_reads_the_same(tmp_path, monkeypatch, store_format):
    latents = np.random.default_rng(0).standard_normal((40, 4, 6, 5), np.float32).astype(np.float16)
    path = make_cache(tmp_path / "cache", latents, store_format=store_format, samples_per_shard=7)
    numbers = np.random.default_rng(1).permutation(40)
    monkeypatch.setattr(reader, "gather", move_rows)
    np.testing.assert_array_equal(open_cache(path).read(numbers), latents[numbers])
    monkeypatch.setattr(reader, "gather", module.gather)
    np.testing.assert_array_equal(open_cache(path).read(numbers), latents[numbers])
