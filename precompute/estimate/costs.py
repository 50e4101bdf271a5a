"""The formulas of an estimate: hours, and the saving of encoding once instead of in every epoch.

Hours are linear in the number of images. A training that encodes in its loop decodes ahead of its steps, and a training
from a cache reads ahead: the slower activity sets the pace. Encoding and the training step run one after the other on
the GPU. The step time may come from a run of `trainer train`; this program does not import the names of its files and
fields, but a test holds them equal.
"""

from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import yaml

from cache_store.errors import ConfigError, MissingPathError

HOUR_S = 3_600.0
GB = 1e9


def build_hours(images: int, images_per_s: float, workers: int = 1, shards: int | None = None) -> float:
    """Compute the hours of a build with equally fast workers, which share `shards` equal shards."""
    share = 1 / workers if shards is None else ceil(shards / workers) / shards
    return images / images_per_s * share / HOUR_S


def cores_to_feed(encode_per_s: float, decode_per_s: float, cores: int) -> float:
    """Compute how many cores keep one encoder busy, if `cores` cores decode `decode_per_s` images."""
    return encode_per_s / decode_per_s * cores


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training that sees every image once an epoch, on GPUs that each have their own encoder and decoding."""

    images: int
    batch_size: int
    """Samples per step, over all GPUs."""
    step_s: float
    """Seconds of a step without encoding and reading."""
    gpus: int
    encode_per_s: float
    """Images per second that one encoder handles if it never waits."""
    decode_per_s: float
    """Images per second that are decoded for one GPU."""
    build_per_s: float
    """Images per second that one worker of a build handles."""
    sample_bytes: float
    read_bytes_per_s: float

    @property
    def encode_s(self) -> float:
        """Compute the seconds that encoding adds to a step."""
        return self.batch_size / (self.encode_per_s * self.gpus)

    @property
    def live_step_s(self) -> float:
        """Compute the seconds of a step that includes encoding."""
        return max(self.step_s + self.encode_s, self.batch_size / (self.decode_per_s * self.gpus))

    @property
    def cached_step_s(self) -> float:
        return max(self.step_s, self.batch_size * self.sample_bytes / self.read_bytes_per_s)

    @property
    def build_gpu_hours(self) -> float:
        return build_hours(self.images, self.build_per_s)

    @property
    def saved_gpu_hours_per_epoch(self) -> float:
        """Compute the GPU-hours saved per epoch; negative if reading is slower than encoding."""
        steps = self.images / self.batch_size
        return steps * (self.live_step_s - self.cached_step_s) * self.gpus / HOUR_S

    def saved_gpu_hours(self, epochs: float) -> float:
        """Return the GPU-hours saved over `epochs` minus those of the build; negative if caching does not pay."""
        return epochs * self.saved_gpu_hours_per_epoch - self.build_gpu_hours

    def break_even_epochs(self, other_gpu_hours: float = 0.0) -> float:
        """Return after how many epochs the build and `other_gpu_hours` are paid back; infinite if never."""
        saved = self.saved_gpu_hours_per_epoch
        return (self.build_gpu_hours + other_gpu_hours) / saved if saved > 0 else inf


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices in dollars."""

    gpu_hour: float
    gb_month: float

    def storage(self, cache_bytes: float, months: float) -> float:
        return cache_bytes / GB * self.gb_month * months

    def saved(self, gpu_hours: float, cache_bytes: float, months: float) -> float:
        """Return the dollars saved; negative if storage costs more than the saved GPU-hours."""
        return gpu_hours * self.gpu_hour - self.storage(cache_bytes, months)

    def break_even_epochs(self, training: Training, cache_bytes: float, months: float) -> float:
        """Return after how many epochs the build and the storage are paid back."""
        stored = self.storage(cache_bytes, months)
        if not self.gpu_hour:
            return inf if stored else training.break_even_epochs()
        return training.break_even_epochs(stored / self.gpu_hour)


METRICS_FILE, CONFIG_FILE = "metrics.jsonl", "config.yaml"

WARM_UP_STEPS = 5
"""First steps that longer runs leave out, because they load and compile."""


@dataclass(frozen=True)
class MeasuredStep:
    """The median step time of a run, and its batch size."""

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
    for line in require_file(path).read_bytes().splitlines():
        try:
            record = msgspec.json.decode(line, type=StepRecord)
        except msgspec.DecodeError:
            continue
        if record.samples_per_s > 0:
            records.append(record)
    return records


def read_batch_size(path: Path) -> int:
    try:
        config: Any = yaml.safe_load(require_file(path).read_bytes())
        return msgspec.convert(config["data"]["batch_size"], int)
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, msgspec.ValidationError):
        raise ConfigError(f"--run: {path} names no data.batch_size; name the folder of a `trainer train`") from None


def require_file(path: Path) -> Path:
    if not path.is_file():
        raise MissingPathError(f"--run: {path} does not exist; name the folder of a `trainer train`")
    return path
