"""Read the step time and the batch size of a `trainer train` run from its folder.

The names of its files and fields are the trainer's, which this program does not import; a test holds them equal.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import yaml

from cache_store.errors import ConfigError, MissingPathError

METRICS_FILE, CONFIG_FILE = "metrics.jsonl", "config.yaml"

WARM_UP_STEPS = 5
"""First steps that longer runs leave out, because they load and compile."""


@dataclass(frozen=True)
class MeasuredStep:
    """The median step of a run."""

    step_s: float
    batch_size: int


class StepRecord(msgspec.Struct):
    """The fields needed here of a line of the metrics file."""

    samples_per_s: float
    data_wait_share: float = 0.0


def read_step(folder: str) -> MeasuredStep:
    """Read the median step time without data waits; raise ConfigError if the folder holds no run with steps."""
    run = Path(folder).expanduser()
    steps = list(step_records(run / METRICS_FILE))
    batch_size = read_batch_size(run / CONFIG_FILE)
    if not steps:
        raise ConfigError(f"--run: {run / METRICS_FILE} holds no step; name the folder of a run that has trained")
    seconds = [batch_size / each.samples_per_s * (1.0 - each.data_wait_share) for each in steps]
    return MeasuredStep(median(seconds[WARM_UP_STEPS:] or seconds), batch_size)


def step_records(path: Path) -> list[StepRecord]:
    """Read the records of the metrics file; skip lines that a kill left broken."""
    records = []
    for line in existing(path).read_bytes().splitlines():
        try:
            record = msgspec.json.decode(line, type=StepRecord)
        except msgspec.DecodeError:
            continue
        if record.samples_per_s > 0:
            records.append(record)
    return records


def read_batch_size(path: Path) -> int:
    try:
        config: Any = yaml.safe_load(existing(path).read_bytes())
        return msgspec.convert(config["data"]["batch_size"], int)
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, msgspec.ValidationError):
        raise ConfigError(f"--run: {path} names no data.batch_size; name the folder of a `trainer train`") from None


def existing(path: Path) -> Path:
    if not path.is_file():
        raise MissingPathError(f"--run: {path} does not exist; name the folder of a `trainer train`")
    return path
