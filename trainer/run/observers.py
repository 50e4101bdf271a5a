"""The interface of observers, which follow a run step by step, and captions formatted for people.

Rank 0 alone has observers, and calls them in their order.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from cache_store.messages import printable

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
    """Whether the model ended its turn within the token limit."""
    reference: str | None
    preview: np.ndarray | None
    """The latent through the cache's linear map to RGB, uint8 [H, W, 3]; None if the cache has none."""

    @property
    def record(self) -> dict[str, Any]:
        """Return the record that the log keeps."""
        return {name: value for name, value in vars(self).items() if name != "preview"}


Captioner = Callable[[Callable[[], bool]], list[Caption]]
"""Captions the run's samples; ends early, with any result, once the function that it is given returns True."""


@dataclass(frozen=True)
class Validation:
    """The result of one validation; empty if none was due."""

    metrics: Metrics = field(default_factory=dict)
    captions: Sequence[Caption] = ()
    summary: str = ""
    """The figures in words, for the terminal."""


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """One finished step of a run."""

    number: int
    total: int
    """Steps of the run."""
    metrics: Metrics
    """Empty if only a validation was done that a stopped run owed this step."""
    validation: Validation
    numbers: np.ndarray
    """Sample numbers of its global batch."""
    stopping: bool = False
    """Whether the run ends after this step, for a rerun to resume."""
    diverged: bool = False
    """Whether the run ends because the step's figures are not finite; nothing of the step is kept."""
    alerts: list[str] = field(default_factory=list)
    """Problems of the run: earlier observers add them, later ones show them."""

    @property
    def is_last(self) -> bool:
        return self.number == self.total


class Observer:
    """Follows a run; every method does nothing unless it is overridden."""

    def begin(self, completed: int) -> None:
        """Prepare for the steps after `completed`; not called if none is left."""

    def after_step(self, step: StepDone) -> None:
        """Record a step."""

    def after_save(self, step: StepDone) -> None:
        """Record a step whose checkpoint, if one was due, is on disk."""

    def finish(self) -> None:
        """Record that the run is complete, now or before."""

    def close(self) -> None:
        """Close whatever `begin` opened; called however the run ends."""


PREVIEW_SIDE = 224
"""Least pixels of a preview's longest side: TensorBoard does not enlarge small pictures."""

NOTHING = "(nothing)"
"""Text shown for an empty answer."""


def caption_lines(caption: Caption) -> Iterator[str]:
    reference = {} if caption.reference is None else {"reference": caption.reference}
    parts = {"answer": caption_text(caption)} | reference
    return answer_lines(f"row {caption.row}, {printable(caption.id)}", parts)


def caption_text(caption: Caption) -> str:
    return shown_answer(caption.text, is_whole=caption.is_whole)


def preview_png(caption: Caption) -> tuple[int, int, bytes] | None:
    """Return height, width and PNG bytes of the preview, enlarged so that each latent cell is a square of pixels."""
    if caption.preview is None:
        return None
    image = Image.fromarray(caption.preview)
    scale = -(-PREVIEW_SIDE // max(image.size))
    image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return image.height, image.width, stream.getvalue()


def shown_answer(text: str, *, is_whole: bool) -> str:
    """Return an answer as shown: NOTHING if it is empty, with `[…]` if it was cut short."""
    return (text + ("" if is_whole else " […]")) if text else NOTHING


def answer_lines(title: str, parts: dict[str, str]) -> Iterator[str]:
    """Yield a title, then each part's lines with its name in front."""
    yield title
    for name, text in parts.items():
        for number, line in enumerate(text.splitlines() or [""]):
            yield f"  {'' if number else name:<9}  {printable(line)}".rstrip()
