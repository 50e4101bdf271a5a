"""The formulas of an estimate: hours, and what encoding once saves against encoding in every epoch.

All are linear in the number of images and of workers. A training with the encoder in its loop decodes ahead of its
steps, as one from a cache reads ahead: whichever is slower sets the pace. Encoding and the step itself take turns on
the GPU.
"""

from dataclasses import dataclass
from math import inf

HOUR_S = 3_600.0
GB = 1e9


def build_hours(images: int, images_per_s: float, workers: int) -> float:
    """Of workers that are all as fast."""
    return images / (images_per_s * workers) / HOUR_S


def cores_to_feed(encode_per_s: float, decode_per_s: float, cores: int) -> float:
    """How many cores decode as fast as one encoder encodes, where `cores` reach `decode_per_s`."""
    return encode_per_s / decode_per_s * cores


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training that sees every image once an epoch, on GPUs that each have an encoder and decoding of their own."""

    images: int
    batch_size: int
    """Of a step, on all GPUs."""
    step_s: float
    """Of a step without encoding and reading."""
    gpus: int
    encode_per_s: float
    """Images that one encoder takes, if they are there."""
    decode_per_s: float
    """Images decoded for one GPU."""
    build_per_s: float
    """Images that one worker of a build takes."""
    sample_bytes: float
    read_bytes_per_s: float

    @property
    def encode_s(self) -> float:
        """What encoding adds to a step."""
        return self.batch_size / (self.encode_per_s * self.gpus)

    @property
    def live_step_s(self) -> float:
        """Of a step with encoding in it."""
        return max(self.step_s + self.encode_s, self.batch_size / (self.decode_per_s * self.gpus))

    @property
    def cached_step_s(self) -> float:
        return max(self.step_s, self.batch_size * self.sample_bytes / self.read_bytes_per_s)

    @property
    def build_gpu_hours(self) -> float:
        return build_hours(self.images, self.build_per_s, 1)

    @property
    def saved_gpu_hours_per_epoch(self) -> float:
        """Below zero where reading is slower than encoding."""
        steps = self.images / self.batch_size
        return steps * (self.live_step_s - self.cached_step_s) * self.gpus / HOUR_S

    def saved_gpu_hours(self, epochs: float) -> float:
        """What is left of that once the build is paid; below zero where caching does not pay."""
        return epochs * self.saved_gpu_hours_per_epoch - self.build_gpu_hours

    def break_even_epochs(self, other_gpu_hours: float = 0.0) -> float:
        """After so many the build has paid, and what costs as much as so many GPU-hours more; infinite if never."""
        saved = self.saved_gpu_hours_per_epoch
        return (self.build_gpu_hours + other_gpu_hours) / saved if saved > 0 else inf


@dataclass(frozen=True, kw_only=True)
class Prices:
    """In dollars."""

    gpu_hour: float
    gb_month: float

    def storage(self, cache_bytes: float, months: float) -> float:
        return cache_bytes / GB * self.gb_month * months

    def saved(self, gpu_hours: float, cache_bytes: float, months: float) -> float:
        """Below zero where storing costs more than the GPU-hours that it saves."""
        return gpu_hours * self.gpu_hour - self.storage(cache_bytes, months)

    def break_even_epochs(self, training: Training, cache_bytes: float, months: float) -> float:
        """After so many the build and the storage have paid."""
        stored = self.storage(cache_bytes, months)
        if not self.gpu_hour:
            return inf if stored else training.break_even_epochs()
        return training.break_even_epochs(stored / self.gpu_hour)
