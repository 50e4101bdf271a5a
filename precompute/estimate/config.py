"""What `precompute estimate` is told beside a build's config."""

from dataclasses import dataclass, field
from typing import Any

from cache_store.errors import ConfigError
from precompute.config import BuildConfig

BATCH_SIZE = 64
"""As in `configs/train_llava_cc3m.yaml`."""


def option(typed: str, default: Any = None) -> Any:
    """A field whose option is not its name."""
    return field(default=default, metadata={"option": typed})


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(BuildConfig):
    """Measure what a build would take here, and from which epoch on its cache would pay; nothing is written."""

    seconds: float = 60.0
    """How long to measure, beside listing the samples and loading the encoder."""
    batch_size: int | None = option("--batch-size N")
    """Samples of a training step; by default those of the run that is named, or else 64."""
    step_seconds: float | None = option("--step-seconds NUMBER")
    """What a training step takes without encoding; by default as in the run that is named, or else several are shown.
    """
    training_run: str | None = option("--run RUN")
    """Folder of a `trainer train` from a cache, whose metrics say what a step takes."""
    gpus: int = 1
    """GPUs that share such a step; their encoders share the encoding, too."""
    epochs: float | None = None
    """How often the training will see each sample, over all runs on this cache."""
    read_mb_per_s: float = option("--read-mb-per-s NUMBER", 200.0)
    """How fast the cache will be read, ahead of the training: 200 is a slow network disk."""
    dollars_per_gpu_hour: float | None = option("--dollars-per-gpu-hour NUMBER")
    """With --epochs, say what is saved in money, too."""
    dollars_per_gb_month: float = option("--dollars-per-gb-month NUMBER", 0.0)
    """What storing the cache costs, of that money."""
    months: float = 1.0
    """How long the cache will be stored."""

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
            raise ConfigError("--run and --step-seconds both say what a step takes; leave one out")
        if self.dollars_per_gb_month and self.dollars_per_gpu_hour is None:
            raise ConfigError("--dollars-per-gb-month is weighed against GPUs; give --dollars-per-gpu-hour too")
