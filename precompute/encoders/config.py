"""The `encoder:` section of a build's config."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cache_store.errors import ConfigError

if TYPE_CHECKING:
    import torch  # it takes seconds to import, and `--help` needs none of it

Posterior = Literal["mean", "moments"]
ComputeDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Which frozen encoder turns images into latents, and how it runs."""

    model: str
    """Hub id, or a folder as `save_pretrained` leaves it; a subfolder `vae` is found by itself."""
    posterior: Posterior = "mean"
    """`mean` keeps the posterior's mean; `moments` keeps mean and log-variance, twice the channels."""
    compute_dtype: ComputeDtype = "bfloat16"
    """Dtype of weights and activations while encoding; normalisation is float32 in either."""
    batch_size: int = 32
    """Images per planned batch; part of the cache's identity, since batch composition can change bits."""
    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`."""
    fold: bool = True
    """Fold the 3-D encoder into a 2-D one, exact for still images; false keeps diffusers' own path."""
    compile: bool = False
    """Run the folded encoder through torch.compile; it needs a C++ compiler on a CPU, Triton on a GPU."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("encoder.model is empty; give a hub id or a folder")
        if self.batch_size < 1:
            raise ConfigError(f"encoder.batch_size must be at least 1, got {self.batch_size}")
        if self.compile and not self.fold:
            raise ConfigError("encoder.compile needs encoder.fold: true; diffusers' own path is not compiled")

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.compute_dtype]

    @property
    def torch_device(self) -> "torch.device":
        """The device meant; ConfigError when this host has no such device."""
        import torch

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kind, _, index = self.device.partition(":")
        if kind == "cpu" and not index:
            return torch.device("cpu")
        if kind == "cuda" and (index or "0").isdecimal() and int(index or 0) < torch.cuda.device_count():
            return torch.device("cuda", int(index or 0))
        raise ConfigError(
            f"encoder.device is {self.device!r}, but this host has cpu and {torch.cuda.device_count()} GPUs;"
            " use auto, cpu, cuda or cuda:N"
        )
