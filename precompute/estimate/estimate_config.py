"""The config of `precompute estimate`: a build's config plus fields for the measurement and prices."""

from dataclasses import dataclass, field
from typing import Any

from cache_store.errors import ConfigError
from precompute.config import BuildConfig

BATCH_SIZE = 64
"""Default training batch size for images and texts, as in `configs/train_llava_cc3m.yaml`."""


def option(typed: str, default: Any = None) -> Any:
    """Make a field with a command-line option of another name."""
    return field(default=default, metadata={"option": typed})


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(BuildConfig):
    """Measure how long a build would take here and after how many epochs its cache pays off; write nothing."""

    seconds: float = 60.0
    """Seconds to measure, without the time to list the samples and load the encoder."""
    batch_size: int | None = option("--batch-size N")
    """Samples per training step; default: as in --run, else 64, and 1 for clips."""
    step_seconds: float | None = option("--step-seconds NUMBER")
    """Seconds per training step without encoding; default: as in --run, else several values are shown."""
    training_run: str | None = option("--run RUN")
    """Output folder of a `trainer train` run from a cache; its metrics give the step time."""
    gpus: int = 1
    """GPUs that share a training step; each encodes its share of the batch."""
    epochs: float | None = None
    """Number of times that training will see each sample, over all runs on this cache."""
    read_mb_per_s: float = option("--read-mb-per-s NUMBER", 200.0)
    """Read speed of the cache in MB/s; 200 is a slow network disk."""
    dollars_per_gpu_hour: float | None = option("--dollars-per-gpu-hour NUMBER")
    """Price of a GPU-hour; with --epochs, the saving in dollars is reported too."""
    dollars_per_gb_month: float = option("--dollars-per-gb-month NUMBER", 0.0)
    """Price of storing one GB for a month."""
    months: float = 1.0
    """Months for which the cache will be stored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero = ("seconds", "batch_size", "step_seconds", "gpus", "epochs", "read_mb_per_s")
        for name in above_zero:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, got {value}")
        for name in ("dollars_per_gpu_hour", "dollars_per_gb_month", "months"):
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise ConfigError(f"{name} must be at least 0, got {value}")
        if self.training_run is not None and self.step_seconds is not None:
            raise ConfigError("--run and --step-seconds both set the step time; leave one out")
        if self.dollars_per_gb_month and self.dollars_per_gpu_hour is None:
            raise ConfigError("--dollars-per-gb-month needs --dollars-per-gpu-hour; give both")
