"""Check that every way to build a cache gives the same identity and files, although each build is killed and run again.

The ways are one process, workers, ranks, torchrun, Slurm and Ray, in folders and in an object store. A build is killed
with all its processes at a random moment. Exits with 1 if a way gives other bytes. Slurm is included if `sinfo`
answers, Ray if RAY_ADDRESS names a cluster, an object store if `--url` names an empty folder in one.
"""

import argparse
import hashlib
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

import yaml

from benchmarks.build import save_vae
from benchmarks.harness import ROOT, parser_with, positive_int, print_record, program
from benchmarks.photographs import write_images
from cache_store.cache.metadata import read_seal
from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.storage.store import Store, open_store

PACKAGES = ("torch", "diffusers", "ray", "obstore", "encode-once")
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


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    skipped = {way: reason for way in options.ways if (reason := reason_to_skip(way, options))}
    if skipped.keys() >= {*options.ways}:
        raise ConfigError(f"nothing to compare: {'; '.join(f'{way}: {reason}' for way, reason in skipped.items())}")
    with tempfile.TemporaryDirectory(prefix="identities-", dir=options.folder) as name:
        folder = Path(name)
        write_images(folder / "images", options, options.count)
        if options.model is None:
            save_vae(folder / "model", options.vae)
        shutil.copy(ROOT / "configs/slurm/build.sbatch", folder)
        (folder / CONFIG).write_text(yaml.safe_dump(build_values(folder, options)))
        with Trial(folder, options) as trial:
            outcomes = {way: trial.outcome_of(way) for way in options.ways if way not in skipped}
    print(f"undisturbed, in {trial.seconds:.0f} s: identity {trial.identity}, {len(trial.files)} files besides records")
    print("| way | killed at | identity | equal files | seconds |\n" + "| --- " * 5 + "|")
    for way, each in outcomes.items():
        print(f"| {way} | {each.killed} | {each.identity[:12]} | {each.equal_files} | {each.seconds:.0f} |")
    for way, each in outcomes.items():
        print(f"{way}: {each.commands}")
    for way, reason in skipped.items():
        print(f"skipped: {way}: {reason}")
    equal = all(each.identity == trial.identity and each.equal_files == "all" for each in outcomes.values())
    ways = {way: vars(each) for way, each in outcomes.items()}
    print_record(options, PACKAGES, equal=equal, ways=ways, skipped=skipped)
    return 0 if equal else 1


def option_parser() -> argparse.ArgumentParser:
    names = ("images", "mosaic", "height", "width", "model", "vae", "folder")
    parser = parser_with(__doc__, *names, count=24, batch_size=2)  # a shard holds one batch
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--url", help="an empty folder in an object store, as s3://bucket/folder; emptied in the end")
    sbatch = "options for sbatch: --sbatch='--gpus-per-node=0 --cpus-per-task=2'"
    parser.add_argument("--sbatch", default="", help=sbatch)
    parser.add_argument("--kills", type=positive_int, default=1, help="number of times that each way is killed")
    parser.add_argument("--seed", type=int, help="seed of the random moments; default: a new one each time")
    return parser


def build_values(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    model = str(Path(options.model).absolute() if options.model else folder / "model")
    return {
        "source": {"kind": "folder", "path": str(folder / "images")},
        "image": {"height": options.height, "width": options.width},
        "encoder": {"model": model, "batch_size": options.batch_size},
        "store": {"samples_per_shard": options.batch_size},
        "run": {"workers": 1},
    }


def reason_to_skip(way: str, options: argparse.Namespace) -> str:
    """Return why this machine cannot build in a way; empty if it can."""
    if "ray" in way.split("-") and not os.environ.get("RAY_ADDRESS"):
        return "RAY_ADDRESS names no cluster; `ray start --head` starts one"
    if "store" in way and not options.url:
        return "no --url names an object store"
    if way == "slurm" and shutil.which("sinfo") is None:
        return "Slurm is not installed"
    if way == "slurm" and subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        return "no Slurm controller answers `sinfo`"
    return ""


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
        """Build undisturbed, and measure how long the first shard and each other one takes."""
        store, start = open_store(self._folder / "undisturbed"), time.monotonic()
        self._first_s = 0.0

        def is_over() -> bool:
            if not store.list("commits"):
                self._first_s = time.monotonic() - start
            return False

        self._run(self._commands("undisturbed", WAYS["one-process"]), is_over)
        self.seconds = time.monotonic() - start
        self._shard_s = (self.seconds - self._first_s) / self._shards
        self.identity, self.files = found_in(store)
        return self

    def __exit__(self, *exc: object) -> None:
        for store in (open_store(cache) for cache in self._caches if "://" in cache):
            for name in names_in(store):
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
        other = sorted(name for name in self.files.keys() | files.keys() if self.files.get(name) != files.get(name))
        return Outcome(
            identity=identity,
            equal_files=f"not {', '.join(other)}" if other else "all",
            killed=", ".join(killed),
            seconds=round(time.monotonic() - start, 1),
            commands="; ".join(" & ".join(step) for step in steps).replace(str(self._log), "build.log"),
        )

    def _commands(self, cache: str, steps: Steps) -> Steps:
        def filled(command: str) -> str:
            options = f"{self._options.sbatch} ".lstrip()
            return command.replace("CACHE", cache).replace("LOG", str(self._log)).replace("OPTIONS ", options)

        return tuple(tuple(map(filled, step)) for step in steps)

    def _killed(self, steps: Steps, store: Store) -> str:
        """Run the steps until a random moment of a random shard, kill them, and return how far they came.

        The time of the first shard begins with the programs.
        """
        shards = self._random.randrange(self._shards)
        longer, end = self._random.uniform(0, self._shard_s if shards else self._first_s), math.inf

        def is_over() -> bool:
            nonlocal end
            if end == math.inf and len(store.list("commits")) >= shards:
                end = time.monotonic() + longer
            return time.monotonic() > end

        ended = self._run(steps, is_over)
        return "ended first" if ended else f"{len(store.list('commits'))} of {self._shards} shards"

    def _run(self, steps: Steps, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Run the steps, or kill them once `is_over` returns True; return whether they ended by themselves.

        Raise EncodeOnceError if a step fails.
        """
        places: dict[str, Any] = {"cwd": self._folder, "env": self._environment}
        for step in steps:
            with self._log.open("ab") as log:
                processes = [subprocess.Popen(shlex.split(each), stdout=log, stderr=log, **places) for each in step]
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
                    code = process.returncode
                    raise EncodeOnceError(f"`{command}` exited with {code}; the end of its output is above")
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


main = program(run)

if __name__ == "__main__":
    sys.exit(main())
