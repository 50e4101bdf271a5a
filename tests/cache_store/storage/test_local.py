"""Whole or absent, in a folder of this machine; what lies there and is no file; URLs."""

import errno
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cache_store.errors import ConfigError, NotAFileError
from cache_store.storage.local import LocalStore
from cache_store.storage.store import open_store


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "cache")


def test_a_failed_draft_leaves_neither_file_nor_scratch(store):
    with pytest.raises(RuntimeError), store.draft("a/file") as draft:
        draft.stream.write(b"half")
        raise RuntimeError
    assert store.list("a") == []


def test_a_draft_leaves_the_earlier_file_until_it_is_published(store):
    store.put_whole("file", b"old")
    with store.draft("file") as draft:
        draft.stream.write(b"new")
        draft.finish()
        assert (store.read("file"), bytes(draft.map())) == (b"old", b"new")
    assert store.read("file") == b"old"


def test_a_killed_writers_scratch_is_cleared_and_counted(store):
    code = (
        "import os, sys, pathlib; from cache_store.storage.local import LocalStore\n"
        "with LocalStore(pathlib.Path(sys.argv[1])).draft('file', attempt=3) as draft:\n"
        "    draft.stream.write(b'half'); draft.stream.flush(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(store.root)], check=False).returncode == -9
    assert store.list() == [".file.3.partial"]
    assert store.clear_drafts("file") == 4
    assert store.list() == []


@dataclass(frozen=True)
class NoLinks(LocalStore):
    """As on FAT."""

    def link(self, path: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path), None, str(target))


@pytest.mark.parametrize("kind", [LocalStore, NoLinks])
def test_the_first_writer_of_a_file_wins(tmp_path, kind):
    store = kind(tmp_path)
    assert store.put_if_absent("file", b"first")
    assert not store.put_if_absent("file", b"second")
    assert (store.list(), store.read("file")) == (["file"], b"first")


def test_a_listing_tells_folders_from_files(store):
    store.put_whole("a/b/file", b"")
    store.put_whole("a/c", b"")
    assert (store.list(), store.list("a"), store.list("none")) == (["a/"], ["b/", "c"], [])
    with pytest.raises(NotADirectoryError):
        store.list("a/c")


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.symlink_to("nothing")]
)
def test_what_is_no_file_is_neither_read_nor_waited_for(store, make):
    store.root.mkdir()
    make(store.root / "name")
    assert store.has("name")
    for use in (store.read, store.size, store.open, store.map):
        with pytest.raises(NotAFileError, match="is no file"):
            use("name")


def test_an_empty_file_maps_to_nothing(store):
    store.put_whole("file", b"")
    assert len(store.map("file")) == 0


def test_an_address_of_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match=r"^s3://bucket/cache is a URL; name a local folder$"):
        open_store("s3://bucket/cache")
