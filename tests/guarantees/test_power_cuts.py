"""A power cut at any step of a command, also of one that continues after a kill: whole or absent, and a rerun ends.

`tests/posix_disk.py` says what a power cut may leave of a disk. Every such state is laid out and read by the product.
"""

import errno
import hashlib
import os
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from cache_store.cache.metadata import read_commit
from cache_store.copy import copy
from cache_store.errors import EncodeOnceError
from cache_store.format.layout import SEAL_FILE
from cache_store.format.schema import StoreFormat
from cache_store.verify.verify import verify
from tests.command_runs import COMMANDS, PROGRAMS, Run, make_scene, quick_parsing, records, values_of
from tests.places import Folder
from tests.posix_disk import Disk, Tree, at_stake, disk_of, lay_out, recorded, tree_of, without_scratch

__all__ = ["quick_parsing"]  # a fixture

OF_SHORT = "--config {scene}/short.yaml --cache {cache}"
LINES = {name: [line] for name, line in COMMANDS.items()} | {
    "copy as it is": ["cache-store copy {scene}/before {cache}"],
    "ranks": [
        f"precompute plan {OF_SHORT}",
        f"precompute build {OF_SHORT} --rank 0 --world-size 2",
        f"precompute build {OF_SHORT} --rank 1 --world-size 2",
        f"precompute seal {OF_SHORT}",
    ],
}
"""The lines of each command; a new command is a line here, or in `COMMANDS`."""

FEWEST = {"build": 90, "extend": 28, "retry": 17, "repair": 8, "withdraw": 15}
FEWEST |= {"copy": 15, "copy as it is": 18, "ranks": 90}
"""Least number of different states, as docs/rationale.md has them; threads let it vary a little."""

MAY_BE_NAMED: dict[str, set[str]] = {"repair": {"latents/16x16/c/0/0/0", "commits/000000.json"}}
"""Files that `verify` may name in a sealed cache: a repair has damage."""


def is_being_rewritten(run: Run, folder: Path) -> bool:
    """Return whether a withdrawal was stopped: the old record of a shard stands until the new one replaces it."""
    return run.name == "withdraw" and not (folder / SEAL_FILE).exists()


class Lines(Run):
    def __call__(self, scheme: str = "") -> int:
        for line in LINES[self.name]:
            program, *arguments = self.words(line, scheme)
            if code := PROGRAMS[program](arguments):
                return code
        return 0


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[StoreFormat], Path]:
    """Small builds with an encoder that takes no time."""
    model = Path("examples.own_encoder:PatchColours")
    return cache(lambda form: make_scene(tmp_path_factory.mktemp(form), model, form))


def no_link(path: Path, target: Path) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path), None, str(target))


CASES = [*((name, "zarr", True) for name in LINES), ("copy as it is", "webdataset", True), ("extend", "zarr", False)]
FIRST = ("build", "repair")
"""Commands that `make test` tries too."""


@pytest.mark.parametrize(
    ("name", "form", "has_links"),
    [pytest.param(*case, marks=[] if case[0] in FIRST else pytest.mark.slow) for case in CASES],
)
def test_a_power_cut_at_any_step_leaves_whole_files_and_a_rerun_ends(
    scenes, tmp_path, monkeypatch, name, form, has_links
):
    """A cut during the command, and a cut during its rerun after a kill at any step; also without hard links."""
    if not has_links:
        monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(copy, "COPIED_AT_ONCE", 1)  # a thread, so that the steps are the same in every run
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the model of the disk has its own
    scene, root = scenes(form), tmp_path / "disk"
    root.mkdir()
    run = Lines(scene, tmp_path, name, Folder(root / "cache"))
    right = [values_of(run.whole.path), values_of(scene / "before")]
    moments = steps_of(run, root, disk_of(tree_of(root)))
    killed = {(key_of(moment.seen()), at_stake(moment)): moment for moment in moments if at_stake(moment)}
    reruns = (steps_of(run, root, moment) for moment in killed.values())
    tried = set()
    for moment in chain(moments, chain.from_iterable(reruns)):
        for state in moment.after_a_power_cut():
            if (key := key_of(state)) not in tried:
                tried.add(key)
                lay_out(root, state)
                assert_whole(run, right)
                run.finish()
    assert len(tried) >= FEWEST[name]


def steps_of(run: Run, root: Path, disk: Disk) -> list[Disk]:
    lay_out(root, disk.seen())
    with recorded(root, disk) as moments:
        assert run() == 0
    return moments


def key_of(tree: Tree) -> object:
    """Return a key by which states that no command tells apart are one: they differ in scratch or in empty folders."""
    kept = without_scratch(tree).items()
    return frozenset((path, data) for path, data in kept if data is not None or path.count("/") < 2)


def assert_whole(run: Run, right: list[dict[str, bytes]]) -> None:
    """Check that all files are whole, that every record has its files, and that a sealed cache is sound.

    A cache in which `verify` finds anything may refuse to be read, but gives no wrong value.
    """
    run.assert_whole()
    folder, may_be_named = run.place.path, MAY_BE_NAMED.get(run.name, set())
    for shard in records(run.place):
        for file in read_commit(folder, shard).content.files:
            is_whole = hashlib.sha256((folder / file.path).read_bytes()).hexdigest() == file.sha256
            assert is_whole or file.path in may_be_named or is_being_rewritten(run, folder), file
    if (folder / SEAL_FILE).exists():
        found = {each.file for each in verify(folder, "deep").findings if each.kind != "stray"}
        assert found <= may_be_named
        try:
            assert values_of(folder) in right
        except EncodeOnceError:
            assert found
