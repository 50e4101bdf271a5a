"""`kill -9` and signals at any instant: at most the shard in hand is lost, and a rerun ends in the same bytes."""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from cache_store.cache.metadata import read_seal, read_spec
from cache_store.format.schema import StoreFormat
from cache_store.storage.store import STORES
from cache_store.verify.verify import verify
from precompute.cli import main
from tests.faulty_store import DeadlyStore
from tests.precompute.conftest import (
    SAMPLES,
    assert_same_as_undisturbed,
    config_values,
    image_bytes,
    timeless_files,
    write_config,
    write_source,
)
from tests.precompute.processes import session_members, start, start_building, wait_for, workers_of

KILLS = 20


def run(*arguments: str, dies_at: int = 0) -> None:
    """In a child: its own session, so that its workers can be told from ours.

    `dies_at` is the sync at which a cache at `deadly://PATH` kills it.
    """
    os.setsid()
    syncs = itertools.count(1)
    STORES["deadly"] = lambda path: DeadlyStore(Path(path), dies_at, syncs)
    with Path(os.devnull).open("w") as silence:
        os.dup2(silence.fileno(), 1)
        os.dup2(silence.fileno(), 2)
    sys.exit(main(arguments))


@pytest.fixture(scope="module")
def fork_server():
    """Children that start with everything imported, so that kills land in the build and not in imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["precompute.build", "precompute.encoders.wan", __name__])
    return context


def test_a_killed_build_resumes_to_identical_bytes(fork_server, tmp_path, source_path, vae_path):
    def config(name: str) -> str:
        values = config_values(tmp_path / name, source_path, vae_path, store__samples_per_shard=2)
        return str(write_config(tmp_path / f"{name}.yaml", values))

    def start(name: str) -> multiprocessing.Process:
        process = fork_server.Process(target=run, args=("build", "--config", config(name)))
        process.start()
        return process

    for name in ("first", "undisturbed"):  # the first waits for the server's imports
        started = time.monotonic()
        process = start(name)
        process.join()
        assert process.exitcode == 0
        usual_s = time.monotonic() - started
    expected = timeless_files(tmp_path / "undisturbed")

    moments, kills, finished, attempt = random.Random(0), 0, 0, 0
    while kills < KILLS or not finished:
        name = f"killed-{finished}"
        process = start(name)
        process.join(moments.uniform(0.02, usual_s) if kills < KILLS else None)
        process.kill()
        process.join()
        attempt += 1
        if process.exitcode == -signal.SIGKILL:
            kills += 1
            assert_whole_or_absent(tmp_path / name)
        else:
            assert process.exitcode == 0
            assert timeless_files(tmp_path / name) == expected
            finished += 1
        assert attempt < 10 * KILLS, "the build seems to make no progress"
    assert not verify(tmp_path / f"killed-{finished - 1}", "full").findings


def assert_whole_or_absent(cache: Path) -> None:
    """What a killed build leaves verifies, but for what is not there yet and the scratch it was writing."""
    if not (cache / "zarr.json").exists():
        return
    allowed = ("not committed", "left by a build that died", "not sealed")
    for finding in verify(cache, "full").findings:
        assert any(words in finding.problem for words in allowed), finding


@pytest.fixture(params=get_args(StoreFormat))
def build(request: pytest.FixtureRequest, tmp_path: Path, vae_path: Path) -> Callable[..., list[str]]:
    """The arguments of a build of six samples in the folder of that name, two in the last shard, one of them broken."""
    write_source(tmp_path / "source", range(6))
    store = {"store__samples_per_shard": 4, "store__format": request.param, "run__max_reject_fraction": 0.5}
    config = write_config(tmp_path / "b.yaml", config_values(tmp_path, tmp_path / "source", vae_path, **store))
    return lambda name, *flags, scheme="": [
        *("build", "--config", str(config), "--cache", f"{scheme}{tmp_path / name}", *flags)
    ]


def killed_copies(fork_server: Any, before: Path, arguments: Callable[[str], list[str]]) -> Iterator[Path]:
    """Copies of a cache, each as a program leaves it that is killed at its first sync, at its second, and so on.

    `arguments` are those of the program for a copy of that name.
    """
    for step in itertools.count(1):
        cache = before.with_name(f"killed-{step}")
        shutil.copytree(before, cache)
        process = fork_server.Process(target=run, args=arguments(cache.name), kwargs={"dies_at": step})
        process.start()
        process.join()
        if process.exitcode == 0:
            return
        assert process.exitcode == -signal.SIGKILL
        yield cache


def test_an_extension_killed_at_any_step_ends_in_identical_bytes(fork_server, tmp_path, build):
    """Every other rerun is not asked to extend, which it need not be once the extension has begun."""
    assert main(build("short")) == 0
    short = timeless_files(tmp_path / "short")
    write_source(tmp_path / "source", range(10))
    assert main(build("whole")) == 0
    expected, steps = timeless_files(tmp_path / "whole"), 0
    for cache in killed_copies(
        fork_server, tmp_path / "short", lambda name: build(name, "--extend", scheme="deadly://")
    ):
        steps += 1
        if steps % 2 and main(build(cache.name)):
            assert timeless_files(cache).items() >= short.items(), "refused, though the extension has begun"
        assert main(build(cache.name, "--extend")) == 0
        assert timeless_files(cache) == expected
        assert not verify(cache, "full").findings
    assert steps >= 20, "two for each file that is written, one for each that is withdrawn"
    assert timeless_files(tmp_path / f"killed-{steps + 1}") == expected


def test_an_extension_killed_before_its_spec_is_undone(fork_server, tmp_path, build):
    assert main(build("short")) == 0
    short, undone = timeless_files(tmp_path / "short"), 0
    write_source(tmp_path / "source", range(10))
    for cache in killed_copies(
        fork_server, tmp_path / "short", lambda name: build(name, "--extend", scheme="deadly://")
    ):
        if read_spec(cache).rows == 10:
            break
        write_source(tmp_path / "source", range(6))
        assert main(build(cache.name)) == 0
        assert timeless_files(cache) == short
        assert not verify(cache, "full").findings
        write_source(tmp_path / "source", range(10))
        undone += 1
    assert undone >= 5, "two for each file that is written, one for each that is withdrawn"


def test_a_retry_killed_at_any_step_leaves_none_of_its_scratch(fork_server, tmp_path, build):
    """Until it puts its shard in place, the earlier one still stands, and nothing writes it again."""
    assert main(build("before")) == 0
    before, kept = timeless_files(tmp_path / "before"), 0
    write_source(tmp_path / "source", range(6), sample_004=image_bytes(4))
    for cache in killed_copies(
        fork_server, tmp_path / "before", lambda name: build(name, "--retry-rejected", scheme="deadly://")
    ):
        assert main(build(cache.name)) == 0
        assert not verify(cache, "full").findings
        kept += timeless_files(cache) == before
        assert main(build(cache.name, "--retry-rejected")) == 0
        assert read_seal(cache).rejected == 0
    assert kept > 2, "at the seal, the shard and its samples table"


def test_a_repair_killed_at_any_step_leaves_none_of_its_scratch(fork_server, tmp_path, build):
    assert main(build("before")) == 0
    before = timeless_files(tmp_path / "before")
    for cache in killed_copies(
        fork_server, tmp_path / "before", lambda name: ["repair", f"deadly://{tmp_path / name}", "--shards", "[1]"]
    ):
        assert main(build(cache.name)) == 0
        assert timeless_files(cache) == before
        assert not verify(cache, "full").findings


@pytest.fixture
def values(tmp_path: Path, source_path: Path, vae_path: Path) -> dict[str, Any]:
    """Of a build with many commits, by two workers."""
    cache = tmp_path / "cache"
    return config_values(cache, source_path, vae_path, store__samples_per_shard=1, run__workers=2)


def test_workers_die_with_their_killed_parent_and_the_build_resumes(tmp_path, values):
    process, arguments = start_building(tmp_path, values)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not session_members(process.pid))
    assert main(arguments) == 0
    assert_same_as_undisturbed(tmp_path, values)


def test_a_signal_stops_two_workers_and_leaves_nothing_half_written(tmp_path, values):
    process, arguments = start_building(tmp_path, values)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 3, error
    assert "precompute: stopped: " in error
    assert "run the same command again" in error
    assert "Traceback" not in error
    assert not list((tmp_path / "cache").rglob("*.partial"))
    assert main(arguments) == 0
    assert_same_as_undisturbed(tmp_path, values)


def test_a_signal_to_the_whole_group_stops_workers_and_parent_alike(tmp_path, values):
    """As batch systems and terminals send it."""
    process, _ = start_building(tmp_path, values)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 3, error
    assert len(list((tmp_path / "cache").glob("commits/*.json"))) < SAMPLES, "it went on to the end"
    wait_for(lambda: not session_members(process.pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_while_workers_start_is_a_stop_too(tmp_path, values, number):
    """They are importing then, and nobody has told them yet what a signal means."""
    arguments = ["build", "--config", str(write_config(tmp_path / "b.yaml", values))]
    process = start([sys.executable, "-m", "precompute", *arguments])
    wait_for(lambda: len(workers_of(process.pid)) == 2)
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 3, error
    assert "stopped: " in error
    assert "Traceback" not in error
    wait_for(lambda: not session_members(process.pid))


def test_a_killed_worker_fails_the_build_by_name_and_a_rerun_goes_on(tmp_path, values):
    process, arguments = start_building(tmp_path, values)
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1, error
    assert "died with exit code -9" in error
    assert "Traceback" not in error
    assert main(arguments) == 0
    assert_same_as_undisturbed(tmp_path, values)


def test_a_second_build_of_one_cache_is_refused_and_names_the_first(tmp_path, values, capsys):
    process, arguments = start_building(tmp_path, values)
    process.send_signal(signal.SIGSTOP)
    assert main(arguments) == 1
    assert f"is being written by process {process.pid} on {os.uname().nodename}" in capsys.readouterr().err
    process.kill()
    process.communicate()
    assert main(arguments) == 0
    assert_same_as_undisturbed(tmp_path, values)
