"""The model of a disk: what a power cut may leave of a few calls, by what POSIX promises."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_store.storage.publish import flush
from tests.posix_disk import Disk, disk_of, lay_out, recorded

UNSYNCED = (b"", b"te", bytes(4), b"text")
"""What may be left of four bytes."""

OLD = {"a": b"old", "in": None, "in/b": b"b"}


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    flush(descriptor)
    os.close(descriptor)


def written(folder: Path) -> None:
    (folder / "c").write_bytes(b"text")


def synced(folder: Path) -> None:
    written(folder)
    sync(folder / "c")


def durable(folder: Path) -> None:
    synced(folder)
    sync(folder)


def replaced(folder: Path) -> None:
    synced(folder)
    (folder / "c").replace(folder / "a")


def in_a_new_folder(folder: Path) -> None:
    (folder / "new").mkdir()
    durable(folder / "new")


def linked(folder: Path) -> None:
    os.link(folder / "a", folder / "c")
    (folder / "a").unlink()


def without(name: str) -> dict[str, bytes | None]:
    return {path: data for path, data in OLD.items() if path != name}


LEFT: dict[Callable[[Path], None], list[dict[str, bytes | None]]] = {
    written: [OLD, *({**OLD, "c": data} for data in UNSYNCED)],
    synced: [OLD, {**OLD, "c": b"text"}],
    durable: [{**OLD, "c": b"text"}],
    replaced: [OLD, {**OLD, "c": b"text"}, {**OLD, "a": b"text"}],
    in_a_new_folder: [OLD, {**OLD, "new": None, "new/c": b"text"}],
    linked: [OLD, {**OLD, "c": b"old"}, {**without("a"), "c": b"old"}, without("a")],
}
"""A program's steps, and every state that a power cut after them may leave."""


@pytest.mark.parametrize("program", LEFT, ids=lambda program: program.__name__)
def test_a_power_cut_leaves_only_what_was_synced_for_certain(tmp_path, program):
    lay_out(tmp_path, OLD)
    with recorded(tmp_path, disk_of(OLD)) as moments:
        program(tmp_path)
    left = [*moments[-1].after_a_power_cut()]
    assert all(state in LEFT[program] for state in left)
    assert all(state in left for state in LEFT[program])


def test_a_change_that_is_not_recorded_is_noticed(tmp_path):
    with pytest.raises(AssertionError), recorded(tmp_path, Disk()):
        os.close(os.open(tmp_path / "unseen", os.O_CREAT | os.O_WRONLY))
