"""The batch of an optimizer step: computed from the step's number alone, on any rank."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.data.draws import as_tensors
from trainer.data.prefetch import WindowReader
from trainer.data.stream import LatentStream
from trainer.model.model import ModelInput
from trainer.text.store import TextBatch, TextStore


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of a global batch."""

    numbers: np.ndarray
    """Sample numbers of the whole global batch."""
    label_tokens: int
    """Number of label tokens in the whole global batch; the loss is divided by it."""
    text_tokens: int
    """Number of text tokens in the whole global batch, without padding."""
    micro_batches: list[ModelInput]
    """This rank's samples, one forward and backward pass each."""


@dataclass(frozen=True, kw_only=True)
class StepLoader:
    """Adds text to a stream's latents, and cuts its batches into forward and backward passes."""

    stream: LatentStream
    text: TextStore
    accumulate: int
    """Number of forward and backward passes over a rank's share of a batch."""
    ahead: WindowReader | None
    """Reads ahead for a shuffle in blocks."""
    threads: int
    """Number of threads that read batches at the same time."""
    pin: bool
    """Whether batches are put into page-locked memory, to be copied to a GPU."""
    planned: tuple[int, ...] = ()
    """Lengths that training's texts are padded to; none: the longest text of each pass."""

    def __call__(self, step: int) -> StepBatch:
        """Load the batch of step number `step`, counted from 0."""
        positions = self.stream.order.batch(step)
        numbers, of_rank = self.stream.numbers(positions), self.stream.share.of_batch(positions)
        passes = np.split(of_rank, self.accumulate)
        micro_batches = []
        for each in passes:
            own = numbers[each - positions[0]]
            text = self.text.collate(own, self.planned)
            micro_batches.append(self._ready(self.stream.show(own, each, self.ahead), text))
        return StepBatch(numbers, self.text.label_tokens(numbers), self.text.text_tokens(numbers), micro_batches)

    def load(self, numbers: np.ndarray, latents_of: np.ndarray) -> ModelInput:
        """Load the text of `numbers` with the latents of `latents_of`, from the first view; no latent is drawn."""
        return self._ready(as_tensors(self.stream.source.read(latents_of)), self.text.collate(numbers))

    def _ready(self, latents: Mapping[str, Tensor], text: TextBatch) -> ModelInput:
        batch = model_input(latents, text)
        return batch.pin_memory() if self.pin else batch


def model_input(latents: Mapping[str, Tensor], text: TextBatch) -> ModelInput:
    return ModelInput(latents=latents, **{name: torch.from_numpy(array) for name, array in vars(text).items()})
