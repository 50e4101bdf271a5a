"""The batch of an optimizer step: computed from the step's number alone, on any rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from trainer.data.order import SampleOrder
from trainer.data.stream import as_tensor, batch_positions, rank_slice
from trainer.model.model import ModelInput
from trainer.text.store import TextBatch, TextStore


class LatentSource(Protocol):
    """Anything that gives each tower's samples by sample number: joined caches, or the encoders themselves."""

    def read(self, numbers: np.ndarray) -> Mapping[str, np.ndarray]:
        """Read samples by the tower's name, [N, *shape] each, in the order asked for."""


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of a global batch."""

    numbers: np.ndarray
    """Sample numbers of the whole global batch."""
    label_tokens: int
    """In the whole global batch: what the loss is divided by."""
    micro_batches: list[ModelInput]
    """This rank's samples, one forward and backward pass each."""


@dataclass(frozen=True, kw_only=True)
class StepLoader:
    """Makes the batch of any step."""

    source: LatentSource
    text: TextStore
    order: SampleOrder
    train: np.ndarray
    """Sample numbers of the training split; `order` permutes this array's indices."""
    batch_size: int
    accumulate: int
    """Forward and backward passes that a rank's share is cut into."""
    rank: int
    world_size: int
    pin: bool
    """Whether batches go to a GPU, from page-locked memory."""

    def numbers(self, step: int) -> np.ndarray:
        """Return the sample numbers of the global batch that has `step` batches before it."""
        return self.train[self.order.at(batch_positions(step, self.batch_size))]

    def __call__(self, step: int) -> StepBatch:
        numbers = self.numbers(step)
        mine = numbers[rank_slice(self.batch_size, self.rank, self.world_size)]
        parts = mine.reshape(self.accumulate, -1)
        return StepBatch(numbers, self.text.label_tokens(numbers), [self.load(part, part) for part in parts])

    def load(self, numbers: np.ndarray, latents_of: np.ndarray) -> ModelInput:
        """Load the text of `numbers` with the latents of `latents_of`."""
        batch = model_input(self.source.read(latents_of), self.text.collate(numbers))
        return batch.pin_memory() if self.pin else batch


def model_input(latents: Mapping[str, np.ndarray], text: TextBatch) -> ModelInput:
    return ModelInput(
        latents={name: as_tensor(each) for name, each in latents.items()},
        **{name: torch.from_numpy(array) for name, array in vars(text).items()},
    )
