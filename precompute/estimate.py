"""`precompute estimate`: computes hours, bytes, dollars and the break-even from a measured pace.

A training that encodes in its loop decodes ahead of its steps, and one from a cache reads ahead: the slower activity
sets the pace. Encoding and the training step take turns on the GPU. The speed of training may come from a run of
`trainer train`; this program does not import the names of its file and fields, but a test holds them equal.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median

import msgspec

from cache_store.errors import ConfigError, MissingPathError
from cache_store.format.array import CodecName
from cache_store.format.schema import Spec
from cache_store.messages import align_rows, counted, shown_time
from precompute.config import EstimateConfig
from precompute.encode.job import REMEDIES, slowest
from precompute.inputs.busy import Part

HOUR_S, GB = 3_600.0, 1e9
UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3}

WORKERS = (1, 4, 8, 64)

TRAININGS = (1.0, 1 / 3, 0.1)
"""Speeds of training that are shown if none is known, as shares of the encoder's."""

METRICS_FILE = "metrics.jsonl"

WARM_UP_STEPS = 5
"""First steps that longer runs leave out, because they load and compile."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The pace of one worker on this machine, and the size of what it writes."""

    spec: Spec
    """The cache's spec; its plan digest is a placeholder."""
    encoded: int
    """Number of different samples encoded."""
    rejected: Counter[str]
    """Number of rejected samples among them, by reason."""
    device: str
    threads: int
    """Threads that decode."""
    sample_s: float
    """Seconds that the worker took for a sample."""
    busy_s: Mapping[Part, float]
    """Seconds for a sample that each part of the worker was busy; parts work at the same time."""
    stored_bytes: Mapping[CodecName, float]
    """Bytes of a sample in its shard's file."""
    free: int | None
    """Free bytes at the cache's location; None if unknown."""

    @property
    def read_s(self) -> float:
        return self.busy_s.get("source", 0.0) + self.busy_s["decoding"]

    @property
    def cache_bytes(self) -> float:
        """Compute the bytes of all samples; tables and records take some 100 bytes a sample more."""
        return self.stored_bytes[self.spec.array.codec] * self.spec.rows

    @property
    def fits(self) -> bool:
        return self.free is None or self.cache_bytes <= self.free


class StepRecord(msgspec.Struct):
    """The fields needed here of a line of a run's metrics."""

    samples_per_s: float
    data_wait_share: float = 0.0


def training_speed(config: EstimateConfig) -> float | None:
    """Return the samples per second given, else the median of the run's steps without data waits; None if unknown."""
    if config.training_run is None:
        return config.samples_per_s
    path, speeds = Path(config.training_run).expanduser() / METRICS_FILE, list[float]()
    if not path.is_file():
        raise MissingPathError(f"--run: {path} does not exist; name the folder of a `trainer train`")
    for line in path.read_bytes().splitlines():
        try:
            step = msgspec.json.decode(line, type=StepRecord)
        except msgspec.DecodeError:  # a kill left it broken
            continue
        if step.samples_per_s > 0 and step.data_wait_share < 1:
            speeds.append(step.samples_per_s / (1 - step.data_wait_share))
    if not speeds:
        raise ConfigError(f"--run: {path} holds no step; name the folder of a run that has trained")
    return median(speeds[WARM_UP_STEPS:] or speeds)


def estimate_lines(config: EstimateConfig, found: Measured, speed: float | None) -> Iterator[str]:
    """Yield the estimate of a build, and of trainings of this speed if it is known."""
    yield f"{counted(found.spec.rows, 'sample')}; {found.encoded:,} drawn at random and encoded"
    if found.rejected:
        yield "rejected among these: " + ", ".join(
            f"{number:,} {why}" for why, number in sorted(found.rejected.items())
        )
    speeds = [speed] if speed else [share * config.gpus / found.busy_s["encoding"] for share in TRAININGS]
    for lines in (pace_lines(found), build_lines(config, found), size_lines(config, found)):
        yield from ("", *lines)
    yield from ("", *align_rows([TRAINING, *(training_row(config, found, each) for each in speeds)]))


def pace_lines(found: Measured) -> list[str]:
    """Format the pace of a worker and of its parts."""
    noun, limit = found.spec.array.made_of, slowest(found.busy_s)
    assert limit is not None, "a worker has parts"
    cores = ceil(found.read_s / found.busy_s["encoding"] * found.threads)
    decoding = f"{counted(found.threads, 'thread')}; {counted(cores, 'core')} would keep the encoder busy"
    notes = {"decoding": decoding, "encoding": found.device, "writing": "without the disk"}
    rows = [("a worker", per_s(found.sample_s, noun), f"bound by {limit}: {REMEDIES[limit]}")]
    parts = [part for part in REMEDIES if found.busy_s.get(part)]
    rows += [(part, per_s(found.busy_s[part], noun), notes.get(part, "")) for part in parts]
    return align_rows(rows)


def build_lines(config: EstimateConfig, found: Measured) -> list[str]:
    """Format the build's time by number of equal workers, which share whole shards, and its price."""
    build_s, shards = found.spec.rows * found.sample_s, found.spec.num_shards
    times = (shown_time(build_s * ceil(shards / workers) / shards) for workers in WORKERS)
    lines = align_rows([("workers", *map(str, WORKERS)), ("build", *times)])
    if (price := config.dollars_per_gpu_hour) is not None:
        each, million = (seconds / HOUR_S * price for seconds in (build_s, 1e6 * found.sample_s))
        lines.append(f"${each:,.2f} of GPUs, ${million:,.2f} a million {found.spec.array.made_of}s")
    return lines


def size_lines(config: EstimateConfig, found: Measured) -> list[str]:
    """Format the cache's size by codec, and whether it fits."""
    rows = [("codec", "bytes a sample", "whole cache")]
    for codec, size in found.stored_bytes.items():
        chosen = " (chosen)" * (codec == found.spec.array.codec)
        rows.append((codec + chosen, f"{size:,.0f}", shown_bytes(size * found.spec.rows)))
    free = "unknown" if found.free is None else shown_bytes(found.free)
    lines = [*align_rows(rows), f"free at {config.cache}: {free}{'' if found.fits else ': too little'}"]
    if (price := config.dollars_per_gb_month) is not None:
        lines.append(f"${found.cache_bytes / GB * price:,.2f} of storage a month")
    return lines


TRAINING = ("training", "with encoding", "from the cache", "speed-up", "build paid after", "saved in all")


def training_row(config: EstimateConfig, found: Measured, speed: float) -> tuple[str, ...]:
    """Format a training with encoding and from the cache, and what the cache saves in all epochs."""
    live_s, cached_s = seconds_of_training(config, found, speed)
    epoch_s, build_s, saved = (live_s - cached_s) * config.gpus, found.sample_s, "give --epochs"
    paid = f"{build_s / epoch_s:.1f} epochs" if epoch_s > 0 else "never"
    if config.epochs is not None:
        saved_s = (config.epochs * epoch_s - build_s) * found.spec.rows
        saved = f"{'lost: ' * (saved_s < 0)}{shown_time(abs(saved_s))} of GPUs"
        if (price := config.dollars_per_gpu_hour) is not None:
            saved += f", ${abs(saved_s) / HOUR_S * price:,.2f}"
    speeds = (per_s(seconds, "sample") for seconds in (1 / speed, live_s, cached_s))
    return *speeds, f"{live_s / cached_s:,.2f}x", paid, saved


def seconds_of_training(config: EstimateConfig, found: Measured, speed: float) -> tuple[float, float]:
    """Return the seconds of a sample in a training with encoding, and from the cache."""
    live_s = max(1 / speed + found.busy_s["encoding"] / config.gpus, found.read_s / config.gpus)
    return live_s, max(1 / speed, found.cache_bytes / found.spec.rows / (config.read_mb_per_s * 1e6))


def per_s(seconds: float, noun: str) -> str:
    return f"{1 / seconds:,.{1 if seconds > 0.01 else 0}f} {noun}s/s"


def shown_bytes(count: float) -> str:
    """Format a byte count, such as `14.9 GB`."""
    unit, size = next(((unit, size) for unit, size in UNITS.items() if count >= size), ("bytes", 1.0))
    return f"{count / size:,.{1 if size > 1 else 0}f} {unit}"
