"""Workers of this machine are stopped, killed and fail."""

import os
import random
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cache_store.cache.metadata import read_spec
from cache_store.errors import StaleError
from cache_store.storage.local import LocalStore
from precompute.config import BuildConfig, RunConfig
from precompute.encode.job import EncodeJob
from precompute.encode.launchers import run_workers
from precompute.encoders.registry import load_encoder
from precompute.sources.opening import open_source
from tests.families import first_and_slow
from tests.precompute.conftest import Project, make_vae, timeless_files
from tests.precompute.encode.builds import Build, processes_of, start_build, wait_for

MANY_SHARDS = {"store__samples_per_shard": 1}
"""Leaves time to disturb a build."""


def workers_of(build: Build) -> list[int]:
    return [pid for pid, command in processes_of(build.pid).items() if "--multiprocessing-fork" in command]


def has_committed(project: Project, build: Build) -> bool:
    return any(project.cache.glob("commits/*.json"))


def has_workers(project: Project, build: Build) -> bool:
    """Whether both workers exist; they still import, so signals have their default action."""
    return len(workers_of(build)) == 2


def stop_all(project: Project, build: Build) -> None:
    """Send SIGTERM to every process, as a batch system does."""
    os.killpg(build.pid, signal.SIGTERM)


def kill_a_worker(project: Project, build: Build) -> None:
    """Kill a worker at a random moment before the last commit; no shared memory with a name may stay behind."""
    time.sleep(random.random() / 10)
    os.killpg(build.pid, signal.SIGSTOP)
    for process in processes_of(build.pid):
        named = re.findall(r"/dev/shm/.*", Path(f"/proc/{process}/maps").read_text())
        assert all(name.endswith(" (deleted)") for name in named), named
    os.kill(random.choice(workers_of(build)), signal.SIGKILL)
    os.killpg(build.pid, signal.SIGCONT)


def kill_the_parent(project: Project, build: Build) -> None:
    """Kill the parent; another build is refused the cache as long as the parent is only stopped."""
    build.send_signal(signal.SIGSTOP)
    message = project.build(code=1, **MANY_SHARDS)
    assert f"is being written by process {build.pid} on {os.uname().nodename}" in message
    build.kill()


@pytest.mark.parametrize(
    ("moment", "disturb", "code", "said"),
    first_and_slow(
        [
            (has_committed, kill_a_worker, 1, "died with exit code -9"),
            (has_workers, stop_all, 3, "precompute: stopped: "),
            (has_committed, stop_all, 3, "run the same command again"),
            (has_committed, kill_the_parent, -signal.SIGKILL, ""),
        ],
        quick=2,
    ),
)
def test_workers_end_with_their_build_and_a_rerun_goes_on(project, moment, disturb, code, said):
    """The rerun ends in the bytes of an undisturbed build."""
    build = start_build(project.config(run__workers=2, **MANY_SHARDS))
    wait_for(lambda: moment(project, build))
    disturb(project, build)
    _, error = build.communicate(timeout=300)
    assert build.returncode == code, error
    assert said in error
    assert not {"Traceback", "leaked"} & {*error.split()}
    wait_for(lambda: not processes_of(build.pid), timeout_s=10.0)
    assert not (project.cache / "seal.json").exists(), "the build was not disturbed"
    assert code != 3 or not list(project.cache.rglob("*.partial"))
    project.build(**MANY_SHARDS)
    project.build(name="undisturbed", **MANY_SHARDS)
    assert project.files() == timeless_files(project.folder / "undisturbed")


@pytest.mark.slow
def test_a_model_that_changes_as_workers_start_stops_the_build(built, forked_workers):
    config = BuildConfig.of_cache(built.cache)
    encoder, source = load_encoder(config.encoder, config.image_recipe), open_source(config.source)
    other = replace(config.encoder, model=str(make_vae(built.folder / "other", seed=1)))
    changed = replace(config, encoder=other, run=RunConfig(workers=2))
    job = EncodeJob(config=changed, store=LocalStore(built.cache), spec=read_spec(built.cache), shards=[0, 1])
    with built.untouched(), pytest.raises(StaleError, match="encoder.model changed while the build") as refused:
        run_workers(job, source, encoder, lambda _: None)
    assert "weights_sha256" in str(refused.value)
