"""A folder of this machine: scratch files of dead writers, paths that are not regular files, and full disks."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_store.errors import NotAFileError
from cache_store.storage.claim import CLAIM_FILE
from cache_store.storage.local import LocalStore
from tests.full_disk import largest_file
from tests.posix_disk import ROOT, Disk, lay_out, recorded


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


RELIED_ON: dict[str, Callable[[LocalStore], object]] = {
    "the same bytes are put": lambda store: store.put_if_absent("in/file", b"data"),
    "it stays": lambda store: store.make_durable("in/file"),
    "it is deleted": lambda store: store.delete("in/file"),
}


@pytest.mark.parametrize("use", RELIED_ON)
def test_what_a_dead_program_did_survives_a_power_cut_before_it_is_relied_on(store, use):
    """The other program made a folder and a file in it, or deleted the file, and died before it synced any name."""
    disk = Disk()
    file = disk.make(folder := disk.make(ROOT, "in", is_folder=True), "file")
    disk.data[file] = b"data"
    disk.sync(file)
    if use == "it is deleted":
        disk.sync(folder)
        disk.change(folder, {"file": None})
    lay_out(store.root, disk.seen())
    with recorded(store.root, disk) as moments:
        RELIED_ON[use](store)
    before, after = ([each.get("in/file") for each in moments[step].after_a_power_cut()] for step in (0, -1))
    assert {*before} == {b"data", None}
    assert {*after} == {None if use == "it is deleted" else b"data"}


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.symlink_to("nothing")]
)
def test_what_is_no_file_is_neither_read_nor_waited_for(store, make):
    make(store.root / "name")
    assert store.has("name")
    for use in (store.read, store.size, store.open, store.map):
        with pytest.raises(NotAFileError, match="/name"):
            use("name")


def test_a_disk_too_full_for_a_claim_is_named(store):
    with largest_file(0), pytest.raises(OSError, match="File too large") as raised, store.claim():
        pass
    assert raised.value.filename == store.where(CLAIM_FILE)


def test_a_disk_without_locks_is_told_and_written_all_the_same(store, monkeypatch, caplog):
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with caplog.at_level(logging.WARNING, "encode_once"), store.claim(), store.claim(shared=True):
        store.put_whole("a", b"b")
    assert "without locks (Function not implemented), so nothing keeps a second writer out" in caplog.messages[0]
    assert not store.has(CLAIM_FILE)
