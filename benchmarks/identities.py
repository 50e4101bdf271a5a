"""Check that every way to build a cache gives the same identity and files, although each build is killed and run again.

The ways are one process, workers, ranks, torchrun, Slurm and Ray, in folders and in an object store. A build is killed
with all its processes at a random moment. Exits with 1 if a way gives other bytes. Slurm is included if `sinfo`
answers, an object store if `--url` names an empty folder in one.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from benchmarks.build import write_images
from benchmarks.options import parser_with, positive_int
from benchmarks.record import print_record
from benchmarks.ways import CONFIG, ROOT, WAYS, Outcome, Trial
from cache_store.errors import ConfigError
from cache_store.program.running import run_program

PACKAGES = ("torch", "diffusers", "ray", "obstore", "encode-once")


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("benchmarks.identities", run, argv)


def run(argv: Sequence[str]) -> int:
    options = option_parser().parse_args(argv)
    skipped = {way: reason for way in options.ways if (reason := reason_to_skip(way, options))}
    if skipped.keys() >= {*options.ways}:
        raise ConfigError(f"nothing to compare: {'; '.join(f'{way}: {reason}' for way, reason in skipped.items())}")
    from benchmarks.build_parts import save_vae  # torch takes seconds to import

    with tempfile.TemporaryDirectory(prefix="identities-", dir=options.folder) as name:
        folder = Path(name)
        write_images(folder / "images", options, options.count)
        if options.model is None:
            save_vae(folder / "model", options.vae)
        shutil.copy(ROOT / "configs/slurm/build.sbatch", folder)
        (folder / CONFIG).write_text(yaml.safe_dump(build_values(folder, options)))
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
    names = ("images", "height", "width", "model", "vae", "folder")
    parser = parser_with(__doc__, *names, count=24, batch_size=2)  # a shard holds one batch
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--url", help="an empty folder in an object store, as s3://bucket/folder; emptied in the end")
    parser.add_argument(
        "--sbatch", default="", help="options for sbatch: --sbatch='--gpus-per-node=0 --cpus-per-task=2'"
    )
    parser.add_argument("--kills", type=positive_int, default=1, help="number of times that each way is killed")
    parser.add_argument("--seed", type=int, help="seed of the random moments; default: a new one each time")
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


def reason_to_skip(way: str, options: argparse.Namespace) -> str:
    """Return why this machine cannot build in a way; empty if it can."""
    if "ray" in way.split("-") and find_spec("ray") is None:
        return "ray is not installed; run `pip install '.[ray]'`"
    if "store" in way and not options.url:
        return "no --url names an object store"
    if way == "slurm":
        if shutil.which("sinfo") is None:
            return "Slurm is not installed"
        if subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
            return "no Slurm controller answers `sinfo`"
    return ""


def table(outcomes: dict[str, Outcome]) -> list[str]:
    """Return the outcomes as a Markdown table, with the commands below it."""
    lines = [
        "| way | killed at | identity | equal files | seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for way, each in outcomes.items():
        lines.append(f"| {way} | {each.killed} | {each.identity[:12]} | {each.equal_files} | {each.seconds:.0f} |")
    return [*lines, "", *(f"{way}: {each.commands}" for way, each in outcomes.items())]


if __name__ == "__main__":
    sys.exit(main())
