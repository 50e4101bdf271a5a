"""`kill -9` and signals at any instant: at most the shard in hand is lost, and a rerun ends in the same bytes."""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from cache_store.verify import verify
from precompute.cli import main
from tests.precompute.conftest import (
    SAMPLES,
    assert_same_as_undisturbed,
    config_values,
    timeless_files,
    write_config,
    write_source,
)
from tests.precompute.processes import session_members, start, start_building, wait_for, workers_of

KILLS = 20


def run_build(config: str, *flags: str, dies_at: int = 0) -> None:
    """In a child: its own session, so that its workers can be told from ours.

    `dies_at` kills it at its n-th fsync: of a file that has not got its name yet, or of a folder whose names have
    just changed.
    """
    os.setsid()
    if dies_at:
        calls = itertools.count(1)
        os.fsync = lambda descriptor: next(calls) == dies_at and os.kill(os.getpid(), signal.SIGKILL)
    with Path(os.devnull).open("w") as silence:
        os.dup2(silence.fileno(), 1)
        os.dup2(silence.fileno(), 2)
    sys.exit(main(["build", "--config", config, *flags]))


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
        process = fork_server.Process(target=run_build, args=(config(name),))
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


def test_an_extension_killed_at_any_step_goes_on_to_identical_bytes(fork_server, tmp_path, vae_path):
    """Every other rerun is not asked to extend, which it need not be once the extension has begun."""

    def config(name: str) -> str:
        values = config_values(tmp_path / name, tmp_path / "source", vae_path, store__samples_per_shard=4)
        return str(write_config(tmp_path / f"{name}.yaml", values))

    write_source(tmp_path / "source", range(6))
    assert main(["build", "--config", config("short")]) == 0
    short = timeless_files(tmp_path / "short")
    write_source(tmp_path / "source", range(10))
    assert main(["build", "--config", config("whole")]) == 0
    expected, steps = timeless_files(tmp_path / "whole"), 0
    while True:
        steps += 1
        shutil.copytree(tmp_path / "short", tmp_path / f"killed-{steps}")
        arguments = (config(f"killed-{steps}"), "--extend")
        process = fork_server.Process(target=run_build, args=arguments, kwargs={"dies_at": steps})
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        if steps % 2 and main(["build", "--config", arguments[0]]):
            assert timeless_files(tmp_path / f"killed-{steps}") == short, "refused, though the extension has begun"
        assert main(["build", "--config", *arguments]) == 0
        assert timeless_files(tmp_path / f"killed-{steps}") == expected
    assert steps > 24, "two for each of plan, seal, record, build, metadata, shards and seal again"
    assert timeless_files(tmp_path / f"killed-{steps}") == expected
    assert not verify(tmp_path / f"killed-{steps - 1}", "full").findings


def test_workers_die_with_their_killed_parent_and_the_build_resumes(tmp_path, source_path, vae_path):
    values = config_values(tmp_path / "cache", source_path, vae_path, store__samples_per_shard=2, run__workers=2)
    process, arguments = start_building(tmp_path, values)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not session_members(process.pid))
    assert main(arguments) == 0
    assert_same_as_undisturbed(tmp_path, values)


def test_a_signal_stops_two_workers_with_code_3_and_nothing_half_written(tmp_path, source_path, vae_path):
    values = config_values(tmp_path / "cache", source_path, vae_path, store__samples_per_shard=1, run__workers=2)
    process, arguments = start_building(tmp_path, values)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 3, error
    assert "precompute: stopped: " in error
    assert "run the same command again" in error
    assert "Traceback" not in error
    assert not list((tmp_path / "cache").rglob("*.partial"))
    assert main(arguments) == 0
    assert_same_as_undisturbed(tmp_path, values)


def test_a_signal_to_the_whole_group_stops_workers_and_parent_alike(tmp_path, source_path, vae_path):
    """As batch systems and terminals send it."""
    values = config_values(tmp_path / "cache", source_path, vae_path, store__samples_per_shard=1, run__workers=2)
    process, _ = start_building(tmp_path, values)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 3, error
    assert len(list((tmp_path / "cache").glob("commits/latents/*.json"))) < SAMPLES, "it went on to the end"
    wait_for(lambda: not session_members(process.pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("program", ["precompute", "cache_store"])
def test_a_signal_to_the_group_while_workers_are_starting_is_a_stop_too(
    tmp_path, source_path, vae_path, program, number
):
    """They are importing then, and nobody has told them yet what a signal means."""
    values = config_values(tmp_path / "cache", source_path, vae_path, store__samples_per_shard=1, run__workers=2)
    arguments = ["build", "--config", str(write_config(tmp_path / "b.yaml", values))]
    if program == "cache_store":
        assert main([*arguments, "--run.workers", "1"]) == 0
        arguments = ["verify", str(tmp_path / "cache"), "--level", "full", "--jobs", "2"]
    process = start([sys.executable, "-m", program, *arguments])
    wait_for(lambda: len(workers_of(process.pid)) == 2)
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 3, error
    assert "stopped: " in error
    assert "Traceback" not in error
    wait_for(lambda: not session_members(process.pid))


def test_a_killed_worker_fails_the_build_by_name_and_a_rerun_goes_on(tmp_path, source_path, vae_path):
    values = config_values(tmp_path / "cache", source_path, vae_path, store__samples_per_shard=1, run__workers=2)
    process, arguments = start_building(tmp_path, values)
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1, error
    assert "died with exit code -9" in error
    assert "Traceback" not in error
    assert main(arguments) == 0
    assert_same_as_undisturbed(tmp_path, values)


def test_a_second_build_of_one_cache_is_refused_and_names_the_first(tmp_path, source_path, vae_path, capsys):
    values = config_values(tmp_path / "cache", source_path, vae_path, store__samples_per_shard=1)
    process, arguments = start_building(tmp_path, values)
    process.send_signal(signal.SIGSTOP)
    assert main(arguments) == 1
    assert f"is being written by process {process.pid} on {os.uname().nodename}" in capsys.readouterr().err
    process.kill()
    process.communicate()
    assert main(arguments) == 0
    assert_same_as_undisturbed(tmp_path, values)
