"""Workers on this machine, as processes: stopped, killed and failing."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cache_store.cache.metadata import read_spec
from cache_store.errors import StaleError
from cache_store.storage.local import LocalStore
from precompute.config import BuildConfig, RunConfig
from precompute.encode.job import EncodeJob
from precompute.encode.local_engine import run_local
from precompute.encoders.registry import load_encoder
from precompute.sources import open_source
from tests.precompute.conftest import Project, make_vae, timeless_files

MANY = {"store__samples_per_shard": 1}
"""Shards, so that there is time to do something to a build of them."""

Build = subprocess.Popen[str]


def start(project: Project) -> Build:
    """Two workers on the project's cache, in a session of their own, whose number is the parent's."""
    command = [sys.executable, "-m", "precompute", "build", "--config", str(project.config(run__workers=2, **MANY))]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(condition: Callable[[], object], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)


def processes_of(session: int) -> dict[int, str]:
    """Command line of every living process of a session; in /proc/PID/stat: state, parent, group, session."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            command_line = (folder / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if int(its_session) == session and state != "Z":
            found[int(folder.name)] = command_line
    return found


def workers_of(build: Build) -> list[int]:
    """From the moment that they exist."""
    return [pid for pid, command in processes_of(build.pid).items() if "--multiprocessing-fork" in command]


def encoding(project: Project, build: Build) -> object:
    return list(project.cache.glob("commits/*.json"))


def importing(project: Project, build: Build) -> object:
    """Nobody has told workers yet what a signal means."""
    return len(workers_of(build)) == 2


def interrupt_all(project: Project, build: Build) -> None:
    """As terminals do."""
    os.killpg(build.pid, signal.SIGINT)


def terminate_all(project: Project, build: Build) -> None:
    """As batch systems do."""
    os.killpg(build.pid, signal.SIGTERM)


def kill_a_worker(project: Project, build: Build) -> None:
    """Any, at any moment; they share no memory that would stay behind."""
    time.sleep(random.random() / 2)
    for process in processes_of(build.pid):
        named = re.findall(r"/dev/shm/.*", Path(f"/proc/{process}/maps").read_text())
        assert all(name.endswith(" (deleted)") for name in named), named
    os.kill(random.choice(workers_of(build)), signal.SIGKILL)


def kill_a_worker_and_the_parent(project: Project, build: Build) -> None:
    time.sleep(random.random() / 2)
    os.kill(random.choice(workers_of(build)), signal.SIGKILL)
    build.kill()


def kill_the_parent(project: Project, build: Build) -> None:
    """While it stands still, no other build takes its cache."""
    build.send_signal(signal.SIGSTOP)
    message = project.build(code=1, **MANY)
    assert f"is being written by process {build.pid} on {os.uname().nodename}" in message
    build.kill()


def take_the_folder_away(project: Project, build: Build) -> None:
    """A file that lies there makes it a failure of the disk, for root too."""
    shards = project.cache / "latents/c"
    os.killpg(build.pid, signal.SIGSTOP)  # workers too: none is to make the folder anew
    shards.rename(project.folder / "away")
    shards.touch()
    os.killpg(build.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("moment", "deed", "code", "said"),
    [
        (importing, interrupt_all, 3, "precompute: stopped: "),
        (importing, terminate_all, 3, "precompute: stopped: "),
        (encoding, interrupt_all, 3, "run the same command again"),
        (encoding, kill_a_worker, 1, "died with exit code -9"),
        (encoding, take_the_folder_away, 1, ": {cache}/latents/c"),
        (encoding, kill_the_parent, -signal.SIGKILL, ""),
        (encoding, kill_a_worker_and_the_parent, -signal.SIGKILL, ""),
    ],
)
def test_workers_end_with_their_build_and_a_rerun_goes_on(project, moment, deed, code, said):
    """To the bytes of a build that nothing came between; a worker's failure is the build's, in a line."""
    build = start(project)
    wait_for(lambda: moment(project, build))
    deed(project, build)
    _, error = build.communicate(timeout=300)
    assert build.returncode == code, error
    assert said.format(cache=project.cache) in error
    assert not {"Traceback", "leaked"} & {*error.split()}
    wait_for(lambda: not processes_of(build.pid), timeout_s=10.0)
    assert not (project.cache / "seal.json").exists(), "it went on to the end"
    assert code != 3 or not list(project.cache.rglob("*.partial"))
    if (away := project.folder / "away").exists():
        (project.cache / "latents/c").unlink()
        away.rename(project.cache / "latents/c")
    project.build(**MANY)
    project.build(name="undisturbed", **MANY)
    assert project.files() == timeless_files(project.folder / "undisturbed")


def test_a_model_that_changes_as_workers_start_stops_the_build(built, forked_workers):
    config = BuildConfig.of_cache(built.cache)
    encoder, source = load_encoder(config.encoder, config.image.range), open_source(config.source)
    other = replace(config.encoder, model=str(make_vae(built.folder / "other", seed=1)))
    changed = replace(config, encoder=other, run=RunConfig(workers=2))
    job = EncodeJob(config=changed, store=LocalStore(built.cache), spec=read_spec(built.cache), shards=[0, 1])
    with built.untouched(), pytest.raises(StaleError, match="encoder.model changed while the build") as refused:
        run_local(job, source, encoder, threading.Event(), lambda _: None)
    assert "weights_sha256" in str(refused.value)
