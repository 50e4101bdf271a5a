"""An archive's index is read once per machine: a build's workers share their parent's."""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from precompute.sources.archives import tar
from precompute.sources.archives import zip as zips
from precompute.sources.archives.image_store import ImageStore, open_image_store
from precompute.sources.archives.shared_index import LentIndexes
from tests.precompute.sources.test_archives import MAKERS

MEMBERS = [(f"top/{number:03d}.jpg", bytes([number]) * number) for number in range(1, 100)]
TWICE = [*MEMBERS, ("top/005.jpg", b"again")]


def open_in_worker(path: Path, indexes: None, pipe: Connection) -> None:
    """Send what a worker sees of the archive, and how often it read a table of contents."""
    reads, read_zip, read_tar = list[object](), zips.read_zip_index, tar.read_tar_index
    vars(zips)["read_zip_index"] = lambda file: reads.append(file) or read_zip(file)
    vars(tar)["read_tar_index"] = lambda file, texts: reads.append(file) or read_tar(file, texts)
    store = open_image_store(path)
    pipe.send((*seen(store), len(reads)))


def seen(store: ImageStore) -> tuple[list[str], list[str], bytes]:
    names = [*store.listing().names]
    return names, [store.fingerprint(name) for name in names], store.read("007.jpg")


def reported(path: Path, indexes: LentIndexes) -> object:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=open_in_worker, args=(path, indexes, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


@pytest.mark.parametrize("kind", MAKERS)
def test_a_worker_takes_its_parents_index(tmp_path, kind):
    """This holds for names that occur twice, too; the parent uses the same memory."""
    MAKERS[kind](path := tmp_path / "images", TWICE)
    store = open_image_store(path)
    expected = seen(store)
    assert reported(path, LentIndexes()) == (*expected, 0)
    assert seen(store) == expected


def test_an_archive_that_was_replaced_is_read_anew(tmp_path):
    MAKERS["zip"](path := tmp_path / "images", MEMBERS)
    store = open_image_store(path)
    indexes = LentIndexes()
    MAKERS["zip"](other := tmp_path / "other", MEMBERS[:50])
    other.replace(path)
    assert reported(path, indexes) == (*seen(open_image_store(path)), 1)
    assert len(store.listing().names) == len(MEMBERS)
