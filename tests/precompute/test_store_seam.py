"""Every file of a cache is opened, mapped, listed, renamed and deleted by `cache_store/storage` alone."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cli import main as cache_store
from precompute.cli import main as precompute
from tests.precompute.conftest import run_build, write_source

ROOT = Path(__file__).parents[2]

REACHED: list[tuple[str, str]] = []
"""Files of the watched folders, and the module that asked the system for each."""

WATCHED: list[str] = []

EVENTS = {"open", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir"}


def note(event: str, arguments: tuple[object, ...]) -> None:
    if WATCHED and event in EVENTS and str(arguments[0]).startswith(tuple(WATCHED)):
        REACHED.append((str(arguments[0]), asker(sys._getframe())))


sys.addaudithook(note)  # a hook cannot be removed


def asker(frame: FrameType | None) -> str:
    """Return the innermost file of this repository among the callers."""
    while frame and not (frame.f_code.co_filename.startswith(str(ROOT)) and frame.f_code.co_filename != __file__):
        frame = frame.f_back
    return frame.f_code.co_filename if frame else "nobody of ours"


@contextmanager
def watching(*folders: Path) -> Iterator[None]:
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
        assert cache_store(["gallery", str(cache), "-o", str(tmp_path / "page.html")]) == 0
        assert cache_store(["copy", str(cache), str(copy), "--format", "webdataset"]) == 0
        assert precompute(["audit", str(cache), "--samples", "2"]) == 0
        opened = open_cache(cache)
        opened.read(np.arange(len(opened)))
        opened.samples(np.arange(len(opened)))
    assert len(REACHED) > 100
    assert {who for _, who in REACHED if not Path(who).is_relative_to(ROOT / "cache_store/storage")} == set()
