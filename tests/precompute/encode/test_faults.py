"""Disks that fail, kills and signals at every step of every command that writes a cache, and images that go away.

Nothing is left half-written, and the same command again ends in the bytes of a run that nothing came between.
"""

import io
import itertools
import os
import pkgutil
import shutil
import signal
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

import precompute.build.build
from cache_store.cache.metadata import read_commit, read_spec
from cache_store.cli import main as cache_store
from cache_store.format.formats import shard_format
from cache_store.format.names import SEAL_FILE
from cache_store.format.schema import StoreFormat
from cache_store.storage.store import STORES
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.encoders.registry import load_encoder
from tests.faulty_store import DeadlyStore, FaultyDisk, FaultyStore
from tests.forked import FORKED
from tests.full_disk import make_room, mounted_disk
from tests.precompute.conftest import config_values, image_bytes, timeless_files, write_config, write_source

COMMANDS = {
    "build": "build --config {scene}/short.yaml --cache {cache}",
    "extend": "build --config {scene}/grown.yaml --cache {cache} --extend",
    "retry": "build --config {scene}/mended.yaml --cache {cache} --retry-rejected",
    "repair": "repair {cache} --shards 0",
    "convert": "convert {scene}/before {cache} --format {other}",
}
BEFORE = {"extend": "before", "retry": "before", "repair": "damaged"}
"""The cache that a command starts from."""
PLAIN = {"extend": "grown", "retry": "mended", "repair": "short"}
"""The config by which its cache is built again without its flag."""

load_once = cache(load_encoder)


@pytest.fixture(autouse=True)
def quick_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompute.build.build, "load_encoder", load_once)


@pytest.fixture(scope="module", params=get_args(StoreFormat))
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    """A folder of configs and of caches to start from: two shards, of three rows and two, of which one is rejected.

    The grown source adds a row to the second shard, and a third.
    """
    folder = tmp_path_factory.mktemp("scene")
    small: dict[str, Any] = {"store__format": request.param, "store__samples_per_shard": 3, "encoder__batch_size": 2}
    small |= {"image__height": 16, "image__width": 16, "run__max_reject_fraction": 0.5}
    sources: dict[str, tuple[int, dict[str, bytes]]] = {
        "short": (5, {}),
        "grown": (7, {}),
        "mended": (5, {"sample_004": image_bytes(4)}),
    }
    for name, (count, replaced) in sources.items():
        source = write_source(folder / f"source-{name}", range(count), **replaced)
        write_config(folder / f"{name}.yaml", config_values(folder / "before", source, vae_path, **small))
    assert main(["build", "--config", f"{folder}/short.yaml"]) == 0
    damaged = shutil.copytree(folder / "before", folder / "damaged")
    shard = damaged / shard_format(read_spec(damaged)).shard_file(0)
    shard.write_bytes(bytes(reversed(shard.read_bytes())))
    return folder


class Run:
    """A command that is run from the same start again and again, and what it ends in undisturbed."""

    def __init__(self, scene: Path, folder: Path, name: str) -> None:
        self.scene, self.name, self.cache = scene, name, folder / "cache"
        self.before = scene / BEFORE[name] if name in BEFORE else None
        self.start()
        assert self() == 0
        self.whole = self.cache.rename(folder / "whole")
        self.start()

    def start(self) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)
        if self.before:
            shutil.copytree(self.before, self.cache)

    def arguments(self, scheme: str = "") -> list[str]:
        (other,) = set(get_args(StoreFormat)) - {read_spec(self.scene / "before").store_format}
        return COMMANDS[self.name].format(scene=self.scene, cache=f"{scheme}{self.cache}", other=other).split()

    def __call__(self, scheme: str = "") -> int:
        return (cache_store if self.name == "convert" else main)(self.arguments(scheme))

    def assert_whole(self) -> None:
        """Every file is whole, as it was or as it is to be, or absent; but for the scratch of what was killed.

        Where there is a seal, shards and samples tables are all there, and those that it was made of; records too, but
        for a repair, which forgets nothing of what was sealed.
        """
        wholes = [self.whole, self.before] if self.before else [self.whole]
        allowed, found = [timeless_files(each) for each in wholes], timeless_files(self.cache)
        found = {name: data for name, data in found.items() if not name.endswith(".partial")}
        for name, data in found.items():
            assert any(data == each.get(name) for each in allowed), name
        if SEAL_FILE in found:
            assert sealed_files(found) in map(sealed_files, allowed)
            assert self.name == "repair" or records(self.cache) in map(records, wholes)
        assert self.name != "repair" or found[SEAL_FILE] == allowed[0][SEAL_FILE]
        for path in self.cache.glob("commits/*.json") if (self.cache / "zarr.json").exists() else ():
            held = read_commit(self.cache, int(path.stem))
            assert any(held.content == getattr(read_commit(each, int(path.stem)), "content", None) for each in wholes)

    def finish(self, scheme: str = "") -> None:
        assert self(scheme) == 0
        assert timeless_files(self.cache) == timeless_files(self.whole)
        assert not verify(self.cache, "full").findings


def sealed_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """The seal, the shards, and their samples tables."""
    folders = ("latents/c/", "shards/", "samples/")
    return {name: data for name, data in files.items() if name == SEAL_FILE or name.startswith(folders)}


def records(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("commits/*.json"))


def assert_said_in_one_line(capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    starts = ("precompute: ", "cache-store: ")
    (line,) = [line for line in error.replace("\r", "\n").splitlines() if line.startswith(starts) and parts[0] in line]
    for part in parts:
        assert part in line


@pytest.mark.parametrize("name", COMMANDS)
def test_no_half_file_is_left_by_a_disk_failing_at_any_step(scene, tmp_path, monkeypatch, capsys, name):
    """Every write, sync and rename in turn; a disk that is full stays so until there is room."""
    run, disk = Run(scene, tmp_path, name), FaultyDisk()
    monkeypatch.setitem(STORES, "faulty", lambda path: FaultyStore(Path(path), disk))
    assert run("faulty://") == 0
    steps = [(kind, number) for kind, total in dict(disk.count).items() for number in range(1, total + 1)]
    assert {kind for kind, _ in steps} == {"write", "sync", "rename"}
    for kind, number in steps:
        run.start()
        capsys.readouterr()
        disk.choose(kind, number)
        assert run("faulty://") == 1, (kind, number)
        problem = "No space left on device" if kind == "write" else "Input/output error"
        assert_said_in_one_line(capsys, f"error: {problem}: {tmp_path}")
        assert not list(run.cache.rglob("*.partial"))
        run.assert_whole()
        disk.mend()
        run.finish("faulty://")


def run_until_killed(arguments: list[str], dies_at: int) -> None:
    """In a child: a cache at `deadly://PATH` kills it at that sync."""
    syncs = itertools.count(1)
    STORES["deadly"] = lambda path: DeadlyStore(Path(path), dies_at, syncs)
    with Path(os.devnull).open("w") as silence:
        os.dup2(silence.fileno(), 1)
        os.dup2(silence.fileno(), 2)
    sys.exit(main(arguments))


@pytest.mark.parametrize("name", ["build", *PLAIN])
def test_a_killed_build_resumes_to_identical_bytes(scene, tmp_path, name):
    """At any sync: of a file that has not got its name yet, or of a folder whose names have just changed.

    No shard is damaged then. A new build is killed again and again in one cache. After the others, a build without
    their flags goes on with what has begun, or refuses it; that of the earlier source undoes an extension whose spec is
    not written yet.
    """
    run, undone, kept = Run(scene, tmp_path, name), 0, 0
    for step in itertools.count(1):
        if name != "build":
            run.start()
        process = FORKED.Process(target=run_until_killed, args=(run.arguments("deadly://"), step))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        run.assert_whole()
        if name != "repair" and (run.cache / "zarr.json").exists():
            findings = verify(run.cache, "full").findings
            assert all(each.shard is None or "not committed" in each.problem for each in findings), findings
        if name == "build":
            continue
        if name == "extend" and read_spec(run.cache).rows == 5:
            earlier = shutil.copytree(run.cache, tmp_path / f"undone-{step}")
            assert main(["build", "--config", f"{scene}/short.yaml", "--cache", str(earlier)]) == 0
            assert timeless_files(earlier) == timeless_files(run.before)
            undone += 1
        if step % 2:
            refused = main(["build", "--config", f"{scene}/{PLAIN[name]}.yaml", "--cache", str(run.cache)])
            now, before = timeless_files(run.cache), timeless_files(run.before)
            if refused:
                assert (name, now.items() >= before.items()) == ("extend", True), "refused, though it had begun"
            else:
                assert name == "repair" or not verify(run.cache, "full").findings
                assert not list(run.cache.rglob("*.partial"))
            kept += sealed_files(now) == sealed_files(before)
        run.finish()
    assert timeless_files(run.cache) == timeless_files(run.whole)
    assert step > 7, "two for each file that is written, one for each that is withdrawn"
    assert (undone >= 5) is (name == "extend")
    assert kept >= 2 or name != "retry", "until a shard is put in place, the earlier one stands"


SIGNALS = [signal.SIGTERM, signal.SIGINT]

PHASES = [
    ("build", "precompute.build.build:make_plan", 1),
    ("build", "precompute.resume.act:write_build", 1),
    ("build", "precompute.encoders.vaes.vae:VaeEncoder.encode", 3),
    ("build", "cache_store.cache.writing.shard_files:write_rows", 2),
    ("build", "precompute.build.build:make_seal", 1),
    ("build", "precompute.build.build:write_seal", 1),
    ("repair", "precompute.build.build:examine_images", 1),
    ("repair", "precompute.encoders.vaes.vae:VaeEncoder.encode", 1),
    ("repair", "precompute.build.build:make_seal", 1),
]
"""Commands, and before which call of which function, named in the module that calls it, they are sent a signal."""


@contextmanager
def before_call(place: str, call: int, act: Callable[[], object]) -> Iterator[None]:
    """Act before that call of the function at that place."""
    function, calls = pkgutil.resolve_name(place), itertools.count(1)

    def acting(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            act()
        return function(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(place.replace(":", "."), acting)
        yield


def sent(number: signal.Signals, place: str, call: int) -> AbstractContextManager[None]:
    return before_call(place, call, lambda: os.kill(os.getpid(), number))


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(("name", "place", "call"), PHASES)
def test_a_signal_in_any_phase_ends_a_command_with_code_3(scene, tmp_path, capsys, number, name, place, call):
    run = Run(scene, tmp_path, name)
    with sent(number, place, call):
        assert run() == 3
    assert_said_in_one_line(capsys, "precompute: stopped: ", "run the same command")
    assert not list(run.cache.rglob("*.partial"))
    run.assert_whole()
    run.finish()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_verification_with_code_3_and_no_report(built, number):
    report = built.folder / "report.json"
    arguments = ["verify", built.cache, "--level", "full", "--report", report]
    with built.untouched(), sent(number, "cache_store.verify.verify:seal_findings", 1):
        said = built.run(cache_store, *arguments, code=3)
    assert "cache-store: stopped: nothing was changed; run the same command again" in said
    assert not report.exists()
    built.run(cache_store, *arguments)


def make_tar(source: Path) -> None:
    with zipfile.ZipFile(source / "images.zip") as archive, tarfile.open(source / "images.tar", "w") as tar:
        for member in archive.infolist():
            entry = tarfile.TarInfo(member.filename)
            entry.size = member.file_size
            tar.addfile(entry, io.BytesIO(archive.read(member)))


def move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 4)


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(reversed(path.read_bytes())))


GONE, CHANGED = "was there when the cache was planned and is gone", "was changed while it was read"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("images", move, GONE),
        ("images.zip", Path.unlink, None),
        *((name, change, CHANGED) for name in ("images.zip", "images.tar") for change in (cut, overwrite)),
    ],
)
def test_images_that_change_while_they_are_read_stop_the_build(project, name, change, said):
    """Within the share of rejects that is allowed, too; a deleted archive is read to its end."""
    project.unpack()
    make_tar(project.source)
    kept = shutil.copytree(project.source, project.folder / "kept")
    project.images, allowed = project.source / name, {"run__max_reject_fraction": 1.0}
    with before_call("precompute.encoders.vaes.vae:VaeEncoder.encode", 2, lambda: change(project.images)):
        message = project.build(code=1 if said else 0, **allowed)
    assert said is None or said in message
    assert ("sample-0" if said == GONE else f"{project.images} {said}" if said else "sealed") in message
    shutil.rmtree(project.source)
    kept.rename(project.source)
    project.build(**allowed)
    project.build(name="undisturbed", **allowed)
    assert project.files() == timeless_files(project.folder / "undisturbed")


def test_room_on_a_full_disk_lets_its_build_go_on(built):
    with mounted_disk(built.folder / "disk", "64k") as disk:
        assert f"No space left on device: {disk}/cache/" in built.build(name="disk/cache", code=1)
        make_room(disk)
        built.build(name="disk/cache")
        assert timeless_files(disk / "cache") == timeless_files(built.cache)
