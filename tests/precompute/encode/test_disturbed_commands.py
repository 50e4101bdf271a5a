"""Failing disks and signals at every step of every command that writes a cache, and images that change or vanish.

Nothing is left half-written, and the same command again ends in the bytes of an undisturbed run.
"""

import errno
import itertools
import os
import pkgutil
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cache_store.cache.metadata import read_spec
from cache_store.storage.store import STORES
from tests.command_runs import COMMANDS, Run, make_scene, quick_loading
from tests.families import first_and_slow
from tests.faulty_store import FaultyDisk, FaultyStore
from tests.places import Folder
from tests.precompute.conftest import timeless_files
from tests.precompute.sources.test_archives import make_tar

__all__ = ["quick_loading"]  # a fixture


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    return make_scene(tmp_path_factory.mktemp("scene"), vae_path, getattr(request, "param", "zarr"))


def assert_said_in_one_line(capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    starts = ("precompute: ", "cache-store: ")
    (line,) = [line for line in error.splitlines() if line.startswith(starts) and parts[0] in line]
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("scene", "name"),
    first_and_slow([*(("zarr", name) for name in reversed(COMMANDS)), ("webdataset", "build")]),
    indirect=["scene"],
)
def test_no_half_file_is_left_by_a_disk_failing_at_any_step(scene, tmp_path, monkeypatch, capsys, name):
    """Each write, sync and rename of one build fails in turn; otherwise the first, a middle one and the last.

    A full disk stays full until there is room.
    """
    run, disk = Run(scene, tmp_path, name, Folder(tmp_path / "cache")), FaultyDisk()
    monkeypatch.setitem(STORES, "faulty", lambda path: FaultyStore(Path(path), disk))
    assert run("faulty://") == 0
    numbers = {kind: range(1, total + 1) for kind, total in disk.count.items()}
    if (name, read_spec(scene / "before").store_format) != ("build", "zarr"):
        numbers = {kind: sorted({1, len(each) // 2 + 1, len(each)}) for kind, each in numbers.items()}
    steps = [(kind, number) for kind, each in numbers.items() for number in each]
    assert {kind for kind, _ in steps} == {"write", "sync", "rename"}
    for kind, number in steps:
        run.start()
        capsys.readouterr()
        disk.choose(kind, number)
        assert run("faulty://") == 1, (kind, number)
        assert_said_in_one_line(capsys, os.strerror(errno.ENOSPC if kind == "write" else errno.EIO), str(tmp_path))
        assert not list(run.place.path.rglob("*.partial"))
        run.assert_whole()
        disk.mend()
        run.finish("faulty://")


PHASES = [
    ("build", "precompute.build.steps:look_at_source", 1),
    ("build", "precompute.encoders.vaes.vae:VaeEncoder.encode", 3),
    ("build", "precompute.build.steps:write_seal", 1),
    ("repair", "precompute.build.steps:compare_images", 1),
]
"""A command, a function (named in the module that calls it), and the number of the call before which a signal comes."""


@contextmanager
def before_call(place: str, call: int, act: Callable[[], object]) -> Iterator[None]:
    """Act before the given call of the function at `place`."""
    function, calls = pkgutil.resolve_name(place), itertools.count(1)

    def acting(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            act()
        return function(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(place.replace(":", "."), acting)
        yield


@pytest.mark.parametrize(("name", "place", "call"), PHASES)
def test_a_signal_in_any_phase_ends_a_command_with_code_3(scene, tmp_path, capsys, name, place, call):
    run = Run(scene, tmp_path, name, Folder(tmp_path / "cache"))
    with before_call(place, call, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert run() == 3
    assert_said_in_one_line(capsys, "precompute: stopped: ")
    assert not list(run.place.path.rglob("*.partial"))
    run.assert_whole()
    run.finish()


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(reversed(path.read_bytes())))


CHANGES = [
    ("images", lambda path: path.rename(path.with_name("elsewhere")), "sample-0"),
    ("images.zip", Path.unlink, ""),
    ("images.tar", overwrite, "images.tar"),
]


@pytest.mark.parametrize(("name", "change", "named"), CHANGES)
def test_images_that_change_while_they_are_read_stop_the_build(project, name, change, named):
    """Even if so many rejects are allowed; a deleted archive is read to its end."""
    project.unpack()
    with zipfile.ZipFile(project.source / "images.zip") as archive:
        make_tar(project.source / "images.tar", [(name, archive.read(name)) for name in archive.namelist()])
    kept = shutil.copytree(project.source, project.folder / "kept")
    project.images, allowed = project.source / name, {"run__max_reject_fraction": 1.0}
    with before_call("precompute.encoders.vaes.vae:VaeEncoder.encode", 2, lambda: change(project.images)):
        assert named in project.build(code=1 if named else 0, **allowed)
    shutil.rmtree(project.source)
    kept.rename(project.source)
    project.build(**allowed)
    project.build(name="undisturbed", **allowed)
    assert project.files() == timeless_files(project.folder / "undisturbed")
