"""Every file of a cache is opened, mapped, listed, renamed and deleted by `cache_store/storage` alone."""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache as once
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cli import main as cache_store
from precompute.cli import main as precompute
from tests.precompute.conftest import run_build, write_source

ROOT = Path(__file__).parents[2]
STORAGE = ROOT / "cache_store/storage"

ROOMS = ["cache_store/cache", "cache_store/convert", "cache_store/format", "cache_store/verify"]
ROOMS += ["precompute/audit", "precompute/encode", "precompute/resume", "precompute/build.py", "precompute/plan.py"]
"""What works on caches, and on no other file."""

FILE_CALLS = {"exists", "glob", "is_dir", "is_file", "iterdir", "mkdir", "read_bytes", "read_text", "rename", "rglob"}
FILE_CALLS |= {"listdir", "memmap", "mmap", "rmdir", "rmtree", "scandir", "stat", "touch", "unlink"}
FILE_CALLS |= {"write_bytes", "write_text"}


def file_calls(path: Path) -> Iterator[str]:
    """Names of calls by which a module reaches for a file; `open` is a store's own where a store is asked."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id="open")):
                yield "open"
            case ast.Call(func=ast.Attribute(attr="open", value=asker)) if not ast.unparse(asker).endswith("store"):
                yield "open"
            case ast.Call(func=ast.Attribute(attr=name)) if name in FILE_CALLS:
                yield name


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_but_the_storage_reaches_for_files(room):
    modules = [ROOT / room] if room.endswith(".py") else list((ROOT / room).rglob("*.py"))
    assert modules
    found = {(module.relative_to(ROOT).as_posix(), name) for module in modules for name in file_calls(module)}
    assert not found


REACHED: list[tuple[str, str]] = []
"""Files of the watched folders, and who asked the system for them."""

WATCHED: list[str] = []

EVENTS = {"open", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir"}


def note(event: str, arguments: tuple[object, ...]) -> None:
    if event in EVENTS and str(arguments[0]).startswith(tuple(WATCHED)):
        REACHED.append((str(arguments[0]), asker(sys._getframe())))


def asker(frame: FrameType | None) -> str:
    """The innermost of our own files on the way to a call."""
    while frame and not (frame.f_code.co_filename.startswith(str(ROOT)) and frame.f_code.co_filename != __file__):
        frame = frame.f_back
    return frame.f_code.co_filename if frame else "nobody of ours"


@once
def hook() -> None:
    """For good: it cannot be taken away."""
    sys.addaudithook(note)


@contextmanager
def watching(*folders: Path) -> Iterator[None]:
    hook()
    REACHED.clear()
    WATCHED.extend(f"{folder}/" for folder in folders)
    try:
        yield
    finally:
        WATCHED.clear()


@pytest.mark.parametrize("form", ["zarr", "webdataset"])
def test_every_file_of_a_cache_is_reached_through_its_store(tmp_path, vae_path, form):
    source, cache, copy = write_source(tmp_path / "source", range(10)), tmp_path / "cache", tmp_path / "copy"
    with watching(cache, copy):
        run_build(tmp_path, source, vae_path, store__format=form)
        write_source(source, range(12))
        run_build(tmp_path, source, vae_path, "--extend", store__format=form)
        assert cache_store(["verify", str(cache), "--level", "deep"]) == 0
        assert precompute(["repair", str(cache), "--shards", "[0]"]) == 0
        assert cache_store(["info", str(cache)]) == 0
        assert cache_store(["convert", str(cache), str(copy), "--format", "webdataset"]) == 0
        assert precompute(["audit", str(cache), "--samples", "2"]) == 0
        opened = open_cache(cache)
        opened.read(np.arange(len(opened)))
        opened.samples(np.arange(len(opened)))
    assert len(REACHED) > 100
    assert {who for _, who in REACHED if not Path(who).is_relative_to(STORAGE)} == set()
