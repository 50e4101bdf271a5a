"""The batch of an optimizer step: computed from the step's number alone, on any rank."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from trainer.data.order import SampleOrder
from trainer.data.posterior import sample_posterior
from trainer.data.stream import RankShare, as_tensor, batch_positions
from trainer.data.views import Views
from trainer.data.windows import Samples, WindowReader
from trainer.model.model import ModelInput
from trainer.text.store import TextBatch, TextStore


class LatentSource(Protocol):
    """Anything that gives each tower's samples by sample number: joined caches, or the encoders themselves."""

    def read(self, numbers: np.ndarray) -> Samples:
        """Read samples in the order asked for."""


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of a global batch."""

    numbers: np.ndarray
    """Sample numbers of the whole global batch."""
    label_tokens: int
    """In the whole global batch: what the loss is divided by."""
    text_tokens: int
    """In the whole global batch, without padding."""
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
    share: RankShare
    accumulate: int
    """Forward and backward passes that a rank's share is cut into."""
    sampled: Collection[str]
    """Towers whose latents are drawn from their posteriors when training shows them."""
    end: int
    """Position at which the run ends."""
    threads: int
    """By which batches are read at the same time."""
    pin: bool
    """Whether batches go to a GPU, from page-locked memory."""
    planned: tuple[int, ...] = ()
    """Lengths that training's texts are padded to; none: the longest of a pass."""

    def __call__(self, step: int) -> StepBatch:
        """Load the batch that has `step` batches before it."""
        positions = batch_positions(step, self.share.batch_size)
        numbers, mine = self.train[self.order.at(positions)], self.share.of(positions)
        parts = [each.reshape(self.accumulate, -1) for each in (numbers[mine - positions[0]], mine)]
        micro_batches = [self.show(*part) for part in zip(*parts, strict=True)]
        text = self.text
        return StepBatch(numbers, text.label_tokens(numbers), text.text_tokens(numbers), micro_batches)

    def show(self, numbers: np.ndarray, positions: np.ndarray) -> ModelInput:
        """Load samples as training shows them at these positions of the run."""
        samples = self.windows(positions) if self.order.block > 1 else self._shown(numbers, positions)
        batch = model_input(samples, self.text.collate(numbers, self.planned))
        latents = dict(batch.latents)
        for tower, name in enumerate(latents):
            if name in self.sampled:
                latents[name] = sample_posterior(latents[name], self.order.seed, positions, tower)
        return self._ready(replace(batch, latents=latents))

    @cached_property
    def windows(self) -> WindowReader:
        """Of a shuffle in blocks."""
        mine = self.share.of
        return WindowReader(self.order, mine, lambda at: self._shown(self.train[self.order.at(at)], at), self.end)

    def _shown(self, numbers: np.ndarray, positions: np.ndarray) -> Samples:
        if isinstance(self.source, Views):
            return self.source.show(numbers, self.order.views_at(positions, len(self.source.views)))
        return self.source.read(numbers)

    def load(self, numbers: np.ndarray, latents_of: np.ndarray) -> ModelInput:
        """Load the text of `numbers` with the latents of `latents_of`: the first view, as it is stored."""
        return self._ready(model_input(self.source.read(latents_of), self.text.collate(numbers)))

    def _ready(self, batch: ModelInput) -> ModelInput:
        return batch.pin_memory() if self.pin else batch


def model_input(latents: Samples, text: TextBatch) -> ModelInput:
    return ModelInput(
        latents={name: as_tensor(each) for name, each in latents.items()},
        **{name: torch.from_numpy(array) for name, array in vars(text).items()},
    )
