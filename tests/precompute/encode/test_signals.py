"""SIGTERM and SIGINT in every phase: exit code 3, nothing half-written, and the same command goes on to the same bytes.

Real processes get real signals; each is held where its phase is until the signal has been sent.
"""

import functools
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cache_store.cache.metadata import read_spec
from cache_store.cli import main as cache_store
from cache_store.format.formats import shard_format
from cache_store.verify.verify import verify
from precompute.cli import main as precompute
from tests.precompute.conftest import timeless_files
from tests.precompute.encode.test_faults import assert_whole
from tests.precompute.processes import wait_for

PROGRAMS = {"precompute": precompute, "cache-store": cache_store}
SIGNALS = [signal.SIGTERM, signal.SIGINT]


class Place(NamedTuple):
    """Before one of the calls of a function, named in the module that calls it."""

    function: str
    call: int = 1


BUILD_PHASES = {
    "planning": Place("precompute.build:make_plan"),
    "planned": Place("precompute.resume.act:write_build"),
    "encoding": Place("precompute.encoders.vae:VaeEncoder.encode", 3),
    "writing": Place("cache_store.cache.shard_files:write_rows", 2),
    "sealing": Place("precompute.build:make_seal"),
    "writing the seal": Place("precompute.build:write_seal"),
}
REPAIR_PHASES = {
    "examining": Place("precompute.build:examine_images"),
    "encoding": Place("precompute.encoders.vae:VaeEncoder.encode"),
    "sealing": Place("precompute.build:make_seal"),
}


def hold(place: Place, marker: Path) -> None:
    """Let the call wait until the file `marker`, which says that it was reached, is gone."""
    module, _, path = place.function.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function, calls = getattr(owner, name), 0

    def held(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == place.call:
            marker.touch()
            while marker.exists():
                time.sleep(0.005)
        return function(*arguments, **options)

    setattr(owner, name, held)


def run_held(program: str, arguments: list[str], place: Place, folder: Path) -> None:
    """In a child: run a program, held at a place, with its standard error in a file.

    The fork server may have been started, deaf to signals, for the workers of a build in another test.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for name, descriptor in (("out", 1), ("err", 2)):
        with (folder / name).open("w") as stream:
            os.dup2(stream.fileno(), descriptor)
    hold(place, folder / "held")
    sys.exit(PROGRAMS[program](arguments))


@pytest.fixture(scope="module")
def fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["precompute.build", "precompute.encoders.wan", __name__])
    return context


@pytest.fixture
def signalled(fork_server: ForkServerContext, tmp_path: Path) -> Any:
    """Run a program, send it a signal at a place; returns its exit code and what it said."""
    folder = tmp_path / "run"
    folder.mkdir()

    def run(program: str, arguments: list[str], place: Place, number: signal.Signals) -> tuple[int | None, str]:
        process: BaseProcess = fork_server.Process(target=run_held, args=(program, arguments, place, folder))
        process.start()
        wait_for(lambda: (folder / "held").exists() or not process.is_alive())
        assert process.pid is not None
        assert (folder / "held").exists(), (folder / "err").read_text()
        os.kill(process.pid, number)
        (folder / "held").unlink()
        process.join(300)
        return process.exitcode, (folder / "err").read_text()

    return run


@pytest.fixture
def whole(built_once: Path) -> Path:
    """A folder of `source`, `build.yaml` and an undisturbed `cache`."""
    return built_once.parent


def assert_stopped(outcome: tuple[int | None, str], program: str = "precompute") -> None:
    code, error = outcome
    assert code == 3, error
    assert f"{program}: stopped: " in error
    assert "run the same command" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", BUILD_PHASES)
def test_a_signal_in_any_phase_of_a_build_ends_it_with_code_3(signalled, whole, tmp_path, phase, number):
    cache = tmp_path / "cache"
    arguments = ["build", "--config", str(whole / "build.yaml"), "--cache", str(cache)]
    assert_stopped(signalled("precompute", arguments, BUILD_PHASES[phase], number))
    assert not list(tmp_path.rglob("*.partial"))
    assert_whole(cache, whole / "cache")
    assert precompute(arguments) == 0
    assert timeless_files(cache) == timeless_files(whole / "cache")


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", REPAIR_PHASES)
def test_a_signal_in_any_phase_of_a_repair_ends_it_with_code_3(signalled, whole, tmp_path, phase, number):
    cache, damaged = tmp_path / "cache", tmp_path / "damaged"
    shutil.copytree(whole / "cache", damaged)
    shard = damaged / shard_format(read_spec(damaged)).shard_file(1)
    shard.write_bytes(bytes(reversed(shard.read_bytes())))
    shutil.copytree(damaged, cache)
    arguments = ["repair", str(cache), "--shards", "[1]"]
    assert_stopped(signalled("precompute", arguments, REPAIR_PHASES[phase], number))
    assert not list(cache.rglob("*.partial"))
    assert_whole(cache, whole / "cache", damaged)
    assert precompute(arguments) == 0
    assert timeless_files(cache) == timeless_files(whole / "cache")
    assert not verify(cache, "full").findings


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_verification_with_code_3_and_no_report(signalled, whole, tmp_path, number):
    report = tmp_path / "report.json"
    arguments = ["verify", str(whole / "cache"), "--level", "full", "--report", str(report)]
    before = timeless_files(whole / "cache")
    place = Place("cache_store.verify.verify:seal_findings")
    assert_stopped(signalled("cache-store", arguments, place, number), "cache-store")
    assert not report.exists()
    assert timeless_files(whole / "cache") == before
    assert cache_store(arguments) == 0
