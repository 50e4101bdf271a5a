"""Whole or absent, in a folder of this machine; what lies there and is no file."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from cache_store.errors import NotAFileError
from cache_store.storage.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_a_dead_writers_scratch_is_cleared_and_counted(store):
    for name in (".file.1.partial", ".file.3.partial", ".file.x.5.partial", ".other.7.partial"):
        (store.root / name).write_bytes(b"half")
    assert store.clear_drafts("file") == 4
    assert store.list() == [".file.x.5.partial", ".other.7.partial"]


@dataclass(frozen=True)
class NoLinks(LocalStore):
    """As on FAT."""

    def link(self, path: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path), None, str(target))


def test_the_first_writer_of_a_file_wins_without_links_too(tmp_path):
    store = NoLinks(tmp_path)
    assert store.put_if_absent("file", b"first")
    assert store.put_if_absent("file", b"first")
    assert not store.put_if_absent("file", b"second")
    assert (store.list(), store.read("file")) == (["file"], b"first")


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.symlink_to("nothing")]
)
def test_what_is_no_file_is_neither_read_nor_waited_for(store, make):
    make(store.root / "name")
    assert store.has("name")
    for use in (store.read, store.size, store.open, store.map):
        with pytest.raises(NotAFileError, match="is not a file"):
            use("name")
