"""Shared by benchmarks: options, rivals that take turns, and a report that ends with one JSON record."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from cache_store.program.command_line import Parser
from cache_store.program.running import run_program, usable_cores

ROOT = Path(__file__).parent.parent

Seconds = dict[str, list[float]]
"""Seconds of every round, by rival."""


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1; otherwise raise ArgumentTypeError, which argparse reports in one line."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


SHARED: dict[str, dict[str, Any]] = {
    "samples": {"type": positive_int, "help": "number of samples, in each form; 20,000 are 0.5 GB"},
    "samples_per_shard": {"type": positive_int, "default": 4_096},
    "images": {"help": "a folder of JPEGs, in the order of their paths; default: smooth noise"},
    "count": {"type": positive_int, "help": "number of images"},
    "mosaic": {"type": positive_int, "default": 1, "help": "photographs along each side of an image"},
    "height": {"type": positive_int, "default": 224},
    "width": {"type": positive_int, "default": 224},
    "batch_size": {"type": positive_int},
    "model": {"help": "a folder with a VAE, or its hub id; default: a VAE of random weights"},
    "vae": {"choices": ("demo", "full"), "default": "demo", "help": "the demo's narrow VAE, or one of full size"},
    "base_dim": {"type": positive_int, "default": 96, "help": "width of the random VAE; 96 is the full size"},
    "compute_dtype": {"choices": ("float32", "bfloat16")},
    "device": {"default": "auto", "help": "auto, cpu, cuda or cuda:N"},
    "layers": {"type": positive_int, "default": 6, "help": "layers of the language model"},
    "vocabulary": {"type": positive_int},
    "repeats": {"type": positive_int, "default": 5, "help": "rounds that are measured, after one that warms up"},
    "folder": {"help": "where files are written; default: a temporary folder"},
}


def parser_with(description: str | None, *names: str, **defaults: Any) -> Parser:
    """Return a parser with the options of SHARED that `names` and `defaults` name, with these defaults."""
    parser = Parser(prog=f"python -m benchmarks.{Path(sys.argv[0]).stem}", description=description)
    for name in (each for each in SHARED if each in (*names, *defaults)):
        given = {"default": defaults[name]} if name in defaults else {}
        parser.add_argument(f"--{name.replace('_', '-')}", **SHARED[name] | given)
    return parser


def program(run: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Return the `main` of a benchmark: an error that a user can cause becomes one message and an exit code."""
    name = run.__globals__["__spec__"].name

    def main(argv: Sequence[str] | None = None) -> int:
        return run_program(name, run, argv)

    return main


def take_turns(
    rivals: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> Seconds:
    """Time rivals in turns, so that other load affects all equally, after one warm-up run each."""
    for run in rivals.values():
        run()
    seconds: Seconds = {name: [] for name in rivals}
    for _ in range(repeats):
        for name, run in rivals.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return seconds


def rates(amount: float, seconds: Sequence[float]) -> list[float]:
    return [amount / each for each in seconds]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return how many times as fast ours is, round by round, from the speeds of both."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum, to four digits."""
    figures = {"median": median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{figure:.4g}") for name, figure in figures.items()}


def report(
    options: Namespace,
    packages: Sequence[str],
    unit: str,
    speeds: Mapping[str, Sequence[float]],
    over: Mapping[str, Sequence[float]],
    **more: Any,
) -> None:
    """Print speeds, ratios and all else that was measured, and then the record."""
    measured = {unit: spreads(speeds), "ratios": spreads(over)}
    for kind, figures in measured.items():
        for name, each in figures.items():
            low, middle, high = (shown(each[key]) for key in ("min", "median", "max"))
            print(f"{name:<52} {middle:>9} ({low}-{high}) {unit if kind == unit else 'times'}")
    for name, value in more.items():
        for line in value.items() if isinstance(value, dict) else [("", value)]:
            print(name, *line)
    print_record(options, packages, **measured, **more)


def spreads(values: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    return {name: spread(each) for name, each in values.items()}


def shown(figure: float) -> str:
    return f"{figure:,.0f}" if abs(figure) >= 1_000 else f"{figure:.3g}"


def print_record(options: Namespace, packages: Sequence[str], **measured: Any) -> None:
    """Print figures and conditions as one line of JSON, the last line on stdout."""
    conditions = {
        "command": shlex.join(sys.orig_argv),
        "revision": git_revision(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **{each: version_of(each) for each in packages}},
        "environment": {name: value for name, value in os.environ.items() if name.startswith("OMP_")},
        "settings": vars(options),
    }
    print(json.dumps(conditions | measured), flush=True)


def hardware() -> dict[str, Any]:
    """Describe this host: processor, usable cores, memory, load, and GPUs if torch is imported."""
    torch, cpuinfo = sys.modules.get("torch"), Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "gpus": [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())] if torch else [],
    }


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def git_revision() -> str | None:
    """Return the commit, with a `+` if files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
