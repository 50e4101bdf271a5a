"""A folder of this machine: scratch files of dead writers, paths that are not regular files, and full disks."""

import errno
import logging
import os
from pathlib import Path

import pytest

from cache_store.errors import NotAFileError
from cache_store.storage.claim import CLAIM_FILE
from cache_store.storage.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.symlink_to("nothing")]
)
def test_what_is_no_file_is_neither_read_nor_waited_for(store, make):
    make(store.root / "name")
    assert store.has("name")
    for use in (store.read, store.size, store.open, store.map):
        with pytest.raises(NotAFileError, match="/name"):
            use("name")


def test_a_disk_without_locks_is_told_and_written_all_the_same(store, monkeypatch, caplog):
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with caplog.at_level(logging.WARNING, "encode_once"), store.claim(), store.claim(shared=True):
        store.put_whole("a", b"b")
    assert "without locks (Function not implemented), so nothing keeps a second writer out" in caplog.messages[0]
    assert not store.has(CLAIM_FILE)
