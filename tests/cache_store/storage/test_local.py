"""A folder of this machine: scratch files of dead writers, paths that are not regular files, and full disks."""

import os
from pathlib import Path

import pytest

from cache_store.errors import NotAFileError
from cache_store.storage.files import CLAIM_FILE
from cache_store.storage.local import LocalStore
from tests.full_disk import largest_file


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_a_dead_writers_scratch_is_cleared_and_counted(store):
    for name in (".file.1.partial", ".file.3.partial", ".file.x.5.partial", ".other.7.partial"):
        (store.root / name).write_bytes(b"half")
    assert store.clear_drafts("file") == 4
    assert store.list() == [".file.x.5.partial", ".other.7.partial"]


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.symlink_to("nothing")]
)
def test_what_is_no_file_is_neither_read_nor_waited_for(store, make):
    make(store.root / "name")
    assert store.has("name")
    for use in (store.read, store.size, store.open, store.map):
        with pytest.raises(NotAFileError, match="is not a file"):
            use("name")


def test_a_disk_too_full_for_a_claim_is_named(store):
    with largest_file(0), pytest.raises(OSError, match="File too large") as raised, store.claim():
        pass
    assert raised.value.filename == store.where(CLAIM_FILE)
