"""The ways to build a cache that `benchmarks.identities` compares: each is killed at a random moment, and run again."""

import argparse
import hashlib
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

from cache_store.cache.metadata import read_seal
from cache_store.errors import EncodeOnceError
from cache_store.storage.store import Store, open_store

ROOT = Path(__file__).parent.parent
CONFIG = "images.yaml"
JOB = f"identities-{os.getpid()}"
"""Name of the Slurm jobs."""

POLL_S = 0.1

PLAN, SEAL = f"precompute plan --config {CONFIG} --cache CACHE", f"precompute seal --config {CONFIG} --cache CACHE"
BUILD = f"precompute build --config {CONFIG} --cache CACHE"
RANKS = ((PLAN,), (f"{BUILD} --rank 0 --world-size 2", f"{BUILD} --rank 1 --world-size 2"), (SEAL,))
SBATCH = f"sbatch --wait --array=0-1 --job-name={JOB} --output=LOG --open-mode=append OPTIONS build.sbatch"
RAY = ((f"{BUILD} --run.engine ray",),)

Steps = tuple[tuple[str, ...], ...]
"""Steps run one after another; the command lines of a step run at the same time."""

WAYS: dict[str, Steps] = {
    "one-process": ((BUILD,),),
    "two-workers": ((f"{BUILD} --run.workers 2",),),
    "two-ranks": RANKS,
    "torchrun": ((PLAN,), (f"torchrun --nproc-per-node 2 -m {BUILD}",), (SEAL,)),
    "slurm": ((PLAN,), (f"{SBATCH} --config {CONFIG} --cache CACHE",), (SEAL,)),
    "ray": RAY,
    "store-one-process": ((BUILD,),),
    "store-two-ranks": RANKS,
    "store-ray": RAY,
}


@dataclass(frozen=True)
class Outcome:
    """The result of one way to build."""

    identity: str
    equal_files: str
    killed: str
    seconds: float
    commands: str


class Trial:
    """Builds of one config, in a folder and below a URL, compared with an undisturbed build."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._shards = -(-options.count // options.batch_size)
        self._random = random.Random(options.seed)
        self._caches: list[str] = []
        self._log = folder / "log.txt"
        # Commands run as typed, with this environment's programs and this clone's code.
        places = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(ROOT)}
        self._environment = {
            **os.environ,
            **{name: f"{place}{os.pathsep}{os.environ.get(name, '')}" for name, place in places.items()},
        }

    def __enter__(self) -> "Trial":
        store, start, waited = open_store(self._folder / "undisturbed"), time.monotonic(), [0.0]

        def is_over() -> bool:
            if not store.list("commits"):
                waited[0] = time.monotonic() - start
            return False

        self._run(self._commands("undisturbed", WAYS["one-process"]), is_over)
        self.seconds, self._first_s = time.monotonic() - start, waited[0]
        self._shard_s = (self.seconds - self._first_s) / self._shards
        self.identity, self.files = found_in(store)
        return self

    def __exit__(self, *exc: object) -> None:
        for store in (open_store(cache) for cache in self._caches if "://" in cache):
            for name in [*names_in(store)]:
                store.delete(name)

    def outcome_of(self, way: str) -> Outcome:
        """Build in this way: kill it, run it again, and compare the result."""
        start = time.monotonic()
        cache = f"{self._options.url}/{JOB}/{way}" if way.startswith("store") else way
        self._caches.append(cache)
        steps = self._commands(cache, WAYS[way])
        store = open_store(cache if "://" in cache else self._folder / cache)
        killed = [self._killed(steps, store) for _ in range(self._options.kills)]
        self._run(steps)
        identity, files = found_in(store)
        other = {name for name in self.files.keys() | files.keys() if self.files.get(name) != files.get(name)}
        return Outcome(
            identity=identity,
            equal_files="all" if not other else f"not {', '.join(sorted(other))}",
            killed=", ".join(killed),
            seconds=round(time.monotonic() - start, 1),
            commands="; ".join(" & ".join(step) for step in steps).replace(str(self._log), "build.log"),
        )

    def _commands(self, cache: str, steps: Steps) -> Steps:
        given = {"CACHE": cache, "LOG": str(self._log), "OPTIONS ": f"{self._options.sbatch} ".lstrip()}

        def filled(command: str) -> str:
            for word, value in given.items():
                command = command.replace(word, value)
            return command

        return tuple(tuple(map(filled, step)) for step in steps)

    def _killed(self, steps: Steps, store: Store) -> str:
        """Run the steps until a random moment of a random shard, kill them, and return how far they came.

        The time of the first shard begins with the programs.
        """
        shards = self._random.randrange(self._shards)
        longer = self._random.uniform(0, self._shard_s if shards else self._first_s)
        reached = [float("inf")]

        def is_over() -> bool:
            if reached[0] == float("inf") and len(store.list("commits")) >= shards:
                reached[0] = time.monotonic()
            return time.monotonic() > reached[0] + longer

        ended = self._run(steps, is_over)
        return "ended first" if ended else f"{len(store.list('commits'))} of {self._shards} shards"

    def _run(self, steps: Steps, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Run the steps, or kill them once `is_over` returns True; return whether they ended by themselves.

        Raise EncodeOnceError if a step fails.
        """
        for step in steps:
            with self._log.open("ab") as log:
                processes = [
                    subprocess.Popen(
                        shlex.split(command), cwd=self._folder, env=self._environment, stdout=log, stderr=log
                    )
                    for command in step
                ]
            try:
                while any(each.poll() is None for each in processes):
                    if is_over():
                        return False
                    time.sleep(POLL_S)
            finally:
                kill(processes)
            for command, process in zip(step, processes, strict=True):
                if process.returncode:
                    print(self._log.read_text()[-4_000:], file=sys.stderr)
                    raise EncodeOnceError(
                        f"`{command}` exited with {process.returncode}; the end of its output is above"
                    )
        return True


def kill(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Kill the processes that still run, all that they have started, and the Slurm jobs that they wait for."""
    running = [each for each in processes if each.poll() is None]
    for number in with_children([each.pid for each in running]):
        with suppress(ProcessLookupError):  # it has ended
            os.kill(number, SIGKILL)
    if any("sbatch" in str(each.args) for each in running):
        # Slurm sends TERM before KILL; USR2 ends every process that does not handle it just as abruptly.
        for options in ("--signal=USR2", "--state=PENDING"):
            subprocess.run(["scancel", options, f"--name={JOB}"], check=False)
        while subprocess.run(["squeue", "-h", f"--name={JOB}"], capture_output=True, check=True).stdout.strip():
            time.sleep(POLL_S)
    for process in running:
        process.wait()


def with_children(parents: Sequence[int]) -> list[int]:
    """Return the ids of processes and of all their descendants."""
    lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [(int(number), int(parent)) for number, parent in map(str.split, lines.splitlines())]
    found, new = [*parents], set(parents)
    while new := {number for number, parent in pairs if parent in new}:
        found += new
    return found


def found_in(store: Store) -> tuple[str, dict[str, str]]:
    """Return a cache's identity, and the SHA-256 of every file but commit records, which tell when and where."""
    names = (name for name in names_in(store) if not name.startswith(("commits/", ".claim")))
    return read_seal(store).identity, {name: hashlib.sha256(store.read(name)).hexdigest() for name in names}


def names_in(store: Store, folder: str = "") -> list[str]:
    names = [f"{folder}{name}" for name in store.list(folder.rstrip("/"))]
    inside = [names_in(store, name) for name in names if name.endswith("/")]
    return [name for name in names if not name.endswith("/")] + [name for each in inside for name in each]
