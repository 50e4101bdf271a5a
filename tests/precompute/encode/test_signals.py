"""SIGTERM and SIGINT in every phase: exit code 3, nothing half-written, and a rerun ends in the same bytes.

What they do to processes and their workers, `test_kill.py` shows.
"""

import os
import pkgutil
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from cache_store.cli import main as cache_store
from tests.precompute.conftest import timeless_files
from tests.precompute.encode.test_faults import assert_whole

SIGNALS = [signal.SIGTERM, signal.SIGINT]

BUILD_PHASES = {
    "planning": ("precompute.build:make_plan", 1),
    "planned": ("precompute.resume.act:write_build", 1),
    "encoding": ("precompute.encoders.vae:VaeEncoder.encode", 3),
    "writing": ("cache_store.cache.shard_files:write_rows", 2),
    "sealing": ("precompute.build:make_seal", 1),
    "writing the seal": ("precompute.build:write_seal", 1),
}
"""Before which call of which function, named in the module that calls it."""

REPAIR_PHASES = {
    "examining": ("precompute.build:examine_images", 1),
    "encoding": ("precompute.encoders.vae:VaeEncoder.encode", 1),
    "sealing": ("precompute.build:make_seal", 1),
}


@contextmanager
def sent(number: signal.Signals, place: str, call: int) -> Iterator[None]:
    """Send this process a signal before a call of the function at that place."""
    function, calls = pkgutil.resolve_name(place), count(1)

    def signalled(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return function(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(place.replace(":", "."), signalled)
        yield


def assert_stopped(said: str, program: str = "precompute") -> None:
    assert f"{program}: stopped: " in said
    assert "run the same command" in said


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", BUILD_PHASES)
def test_a_signal_in_any_phase_of_a_build_ends_it_with_code_3(built, phase, number):
    cache = built.folder / "again"
    with sent(number, *BUILD_PHASES[phase]):
        assert_stopped(built.build(name="again", code=3))
    assert not list(built.folder.rglob("*.partial"))
    assert_whole(cache, built.cache)
    built.build(name="again")
    assert timeless_files(cache) == built.files()


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", REPAIR_PHASES)
def test_a_signal_in_any_phase_of_a_repair_ends_it_with_code_3(built, phase, number):
    with built.same_in_the_end():
        shard = built.cache / "latents/c/1/0/0/0"
        shard.write_bytes(bytes(reversed(shard.read_bytes())))
        whole, damaged = built.folder / "whole", shutil.copytree(built.cache, built.folder / "damaged")
        built.build(name="whole")
        with sent(number, *REPAIR_PHASES[phase]):
            assert_stopped(built.repair("--shards", "[1]", code=3))
        assert not list(built.cache.rglob("*.partial"))
        assert_whole(built.cache, whole, damaged)
        built.repair("--shards", "[1]")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_verification_with_code_3_and_no_report(built, number):
    report = built.folder / "report.json"
    arguments = ["verify", built.cache, "--level", "full", "--report", report]
    with built.untouched(), sent(number, "cache_store.verify.verify:seal_findings", 1):
        assert_stopped(built.run(cache_store, *arguments, code=3), "cache-store")
    assert not report.exists()
    built.run(cache_store, *arguments)
