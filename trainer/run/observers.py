"""Observers are told of each step; rank 0 alone has them, in a list, and calls them in its order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Metrics = dict[str, float | int]
"""Figures by name."""


@dataclass(frozen=True, kw_only=True)
class Caption:
    """The language model's answer to the first question of a held-out sample."""

    row: int
    id: str
    prompt: str
    text: str
    is_whole: bool
    """Whether the model ended its turn itself, within the tokens allowed."""
    reference: str | None
    preview: np.ndarray | None
    """The latent as the cache's map to RGB shows it: uint8 [H, W, 3]."""

    @property
    def record(self) -> dict[str, Any]:
        """Return the record that the log keeps."""
        return {name: value for name, value in vars(self).items() if name != "preview"}


Captioner = Callable[[Callable[[], bool]], list[Caption]]
"""Captions the run's samples; ends early, with anything, where the function that it is given says so."""


@dataclass(frozen=True)
class Validation:
    """What came of one; empty where none was due."""

    metrics: Metrics = field(default_factory=dict)
    captions: Sequence[Caption] = ()
    summary: str = ""
    """For people."""


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """One step, when all that it was due is done."""

    number: int
    total: int
    """Steps of the run."""
    metrics: Metrics
    """Empty where only the validation was done that a stopped run owed this step."""
    validation: Validation
    numbers: np.ndarray
    """Sample numbers of its global batch."""
    stopping: bool = False
    """Whether the run ends after it, to go on at a rerun."""
    diverged: bool = False
    """Whether the run ends because its figures are not finite; nothing of the step is kept."""
    alerts: list[str] = field(default_factory=list)
    """Problems of the run: earlier observers add them, later ones show them."""

    @property
    def is_last(self) -> bool:
        return self.number == self.total


class Observer:
    """Told of a run; each method may be left as it is."""

    def begin(self, completed: int) -> None:
        """Get ready for steps after `completed`; not called where none is left to do."""

    def after_step(self, step: StepDone) -> None:
        """Take note of a step."""

    def after_save(self, step: StepDone) -> None:
        """Take note of a step when its checkpoint, if one was due, is on disk."""

    def finish(self) -> None:
        """Take note that the run is complete, or was already."""

    def close(self) -> None:
        """Let go of what `begin` opened; called however the run ends."""
