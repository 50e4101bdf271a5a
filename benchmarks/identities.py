"""Whether every way to build a cache gives the same identity and files: one process, workers, ranks, torchrun, Slurm,
Ray, in folders and in an object store. Each is killed at a random moment, all its processes at once, and run again.

Exits with 1 if a way gives other bytes. Slurm takes part where `sinfo` answers, an object store where `--url` names an
empty place in one.
"""

import argparse
import hashlib
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
from importlib.util import find_spec
from pathlib import Path
from signal import SIGKILL
from typing import Any

import yaml

from benchmarks.build import write_images
from benchmarks.record import print_record
from cache_store.cache.metadata import read_seal
from cache_store.program.command_line import Parser
from cache_store.program.run_program import run_program
from cache_store.storage.store import Store, open_store

PACKAGES = ("torch", "diffusers", "ray", "obstore", "encode-once")
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
"""Command lines one after another; those of a step run at the same time."""

WAYS: dict[str, Steps] = {
    "one process": ((BUILD,),),
    "two workers": ((f"{BUILD} --run.workers 2",),),
    "two ranks": RANKS,
    "torchrun": ((PLAN,), (f"torchrun --nproc-per-node 2 -m {BUILD}",), (SEAL,)),
    "Slurm array": ((PLAN,), (f"{SBATCH} --config {CONFIG} --cache CACHE",), (SEAL,)),
    "Ray": RAY,
    "store, one process": ((BUILD,),),
    "store, two ranks": RANKS,
    "store, Ray": RAY,
}


@dataclass(frozen=True)
class Outcome:
    """What became of a way."""

    identity: str
    equal_files: str
    killed: str
    seconds: float
    commands: str


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.identities", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    from benchmarks.build_parts import save_vae  # torch takes seconds to import

    with tempfile.TemporaryDirectory(prefix="identities-", dir=options.folder) as name:
        folder = Path(name)
        write_images(folder / "images", options, options.count)
        if options.model is None:
            save_vae(folder / "model", options.vae)
        shutil.copy(ROOT / "configs/slurm/build.sbatch", folder)
        (folder / CONFIG).write_text(yaml.safe_dump(build_values(folder, options)))
        skipped = {way: reason for way in options.ways if (reason := missing(way, options))}
        with Trial(folder, options) as trial:
            outcomes = {way: trial.outcome_of(way) for way in options.ways if way not in skipped}
    print(f"undisturbed, in {trial.seconds:.0f} s: {len(trial.files)} files besides commit records")
    print(f"identity {trial.identity}\n", *table(outcomes), sep="\n")
    for way, reason in skipped.items():
        print(f"skipped: {way}: {reason}")
    equal = all(each.identity == trial.identity and each.equal_files == "all" for each in outcomes.values())
    ways = {way: vars(each) for way, each in outcomes.items()}
    print_record("identities", PACKAGES, settings=vars(options), equal=equal, ways=ways, skipped=skipped)
    return 0 if equal else 1


def option_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--images", help="a folder of JPEGs; smooth noise without it")
    parser.add_argument("--count", type=int, default=24, help="images of a build")
    parser.add_argument("--height", type=int, default=224)
    parser.add_argument("--width", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=2, help="of the encoder; a shard holds one batch")
    parser.add_argument("--model", help="a folder with a VAE, in place of --vae's of random weights")
    parser.add_argument("--vae", choices=("demo", "full"), default="demo", help="the demo's narrow one, or full size")
    parser.add_argument("--url", help="an empty folder in an object store, as s3://bucket/folder; emptied in the end")
    parser.add_argument("--sbatch", default="", help="options of sbatch, as --sbatch='--gpus-per-node=0'")
    parser.add_argument("--kills", type=int, default=1, help="times that each way is killed")
    parser.add_argument("--seed", type=int, help="of the moments; default another each time")
    parser.add_argument("--folder", help="where caches are written; default a temporary folder")
    parser.set_defaults(mosaic=1)
    return parser


def build_values(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "source": {"kind": "folder", "path": str(folder / "images")},
        "image": {"height": options.height, "width": options.width},
        "encoder": {
            "model": str(Path(options.model).absolute() if options.model else folder / "model"),
            "batch_size": options.batch_size,
        },
        "store": {"samples_per_shard": options.batch_size},
        "run": {"workers": 1},
    }


def missing(way: str, options: argparse.Namespace) -> str:
    """Why this machine cannot do it; empty if it can."""
    if "Ray" in way and find_spec("ray") is None:
        return "ray is not installed; run `pip install '.[ray]'`"
    if "store" in way and not options.url:
        return "no --url names an object store"
    if "Slurm" in way:
        if shutil.which("sinfo") is None:
            return "Slurm is not installed"
        if subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
            return "no Slurm controller answers `sinfo`"
    return ""


class Trial:
    """Builds of one config in a folder and below a URL, compared with one that nothing disturbs."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._shards = -(-options.count // options.batch_size)
        self._random = random.Random(options.seed)
        self._caches: list[str] = []
        self._log = folder / "log.txt"
        # The programs as they are typed, of this environment and this clone.
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

        self._run(self._commands("undisturbed", WAYS["one process"]), is_over)
        self.seconds, self._first_s = time.monotonic() - start, waited[0]
        self._shard_s = (self.seconds - self._first_s) / self._shards
        self.identity, self.files = found_in(store)
        return self

    def __exit__(self, *exc: object) -> None:
        for store in (open_store(cache) for cache in self._caches if "://" in cache):
            for name in [*names_in(store)]:
                store.delete(name)

    def outcome_of(self, way: str) -> Outcome:
        """Build it, killed and run again."""
        name, start = way.replace(",", "").replace(" ", "-"), time.monotonic()
        cache = f"{self._options.url}/{JOB}/{name}" if way.startswith("store") else name
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
        """Run until a random moment of a random shard; that of the first begins with the programs."""
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
        """Run the steps, or kill them once it is over; whether they ended. CalledProcessError where one fails."""
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
                    raise subprocess.CalledProcessError(process.returncode, command)
        return True


def kill(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Those that still run, with all that they have started, and the Slurm jobs that they wait for."""
    running = [each for each in processes if each.poll() is None]
    for number in with_children([each.pid for each in running]):
        with suppress(ProcessLookupError):  # it has ended
            os.kill(number, SIGKILL)
    if any("sbatch" in str(each.args) for each in running):
        # In place of KILL, Slurm would send TERM first; USR2 ends all that does not ask for it as hard.
        for options in ("--signal=USR2", "--state=PENDING"):
            subprocess.run(["scancel", options, f"--name={JOB}"], check=False)
        while subprocess.run(["squeue", "-h", f"--name={JOB}"], capture_output=True, check=True).stdout.strip():
            time.sleep(POLL_S)
    for process in running:
        process.wait()


def with_children(parents: Sequence[int]) -> list[int]:
    """Numbers of processes, and of all that they or their children have started."""
    lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [(int(number), int(parent)) for number, parent in map(str.split, lines.splitlines())]
    found, new = [*parents], set(parents)
    while new := {number for number, parent in pairs if parent in new}:
        found += new
    return found


def found_in(store: Store) -> tuple[str, dict[str, str]]:
    """A cache's identity, and the SHA-256 of every file but commit records, which tell when and by whom."""
    names = (name for name in names_in(store) if not name.startswith(("commits/", ".claim")))
    return read_seal(store).identity, {name: hashlib.sha256(store.read(name)).hexdigest() for name in names}


def names_in(store: Store, folder: str = "") -> list[str]:
    names = [f"{folder}{name}" for name in store.list(folder.rstrip("/"))]
    inside = [names_in(store, name) for name in names if name.endswith("/")]
    return [name for name in names if not name.endswith("/")] + [name for each in inside for name in each]


def table(outcomes: dict[str, Outcome]) -> list[str]:
    """As it stands in docs/scaling.md, with the commands below."""
    lines = [
        "| way | killed at | identity | equal files | seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for way, each in outcomes.items():
        lines.append(f"| {way} | {each.killed} | {each.identity[:12]} | {each.equal_files} | {each.seconds:.0f} |")
    return [*lines, "", *(f"{way}: {each.commands}" for way, each in outcomes.items())]


if __name__ == "__main__":
    sys.exit(main())
