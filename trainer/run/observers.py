"""Observers are told of each step, and its captions laid out for people to read.

Rank 0 alone has observers, in a list, and calls them in its order.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from cache_store.refusal import printable

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


PREVIEW_SIDE = 224
"""Least pixels of a preview's longest side in TensorBoard, which shows small pictures small."""

NOTHING = "(nothing)"
"""Shown in the place of an empty answer."""


def caption_lines(caption: Caption) -> Iterator[str]:
    reference = {} if caption.reference is None else {"reference": caption.reference}
    parts = {"answer": shown_answer(caption.text, is_whole=caption.is_whole)} | reference
    return answer_lines(f"row {caption.row}, {printable(caption.id)}", parts)


def caption_text(caption: Caption) -> str:
    return shown_answer(caption.text, is_whole=caption.is_whole)


def preview_png(caption: Caption) -> tuple[int, int, bytes] | None:
    """Height, width and PNG of the preview, every cell a square of pixels."""
    if caption.preview is None:
        return None
    image = Image.fromarray(caption.preview)
    scale = -(-PREVIEW_SIDE // max(image.size))
    image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return image.height, image.width, stream.getvalue()


def shown_answer(text: str, *, is_whole: bool) -> str:
    """Show an answer that may be empty, or cut short."""
    return (text + ("" if is_whole else " […]")) if text else NOTHING


def answer_lines(title: str, parts: dict[str, str]) -> Iterator[str]:
    """Lay out words under the name of their image, each part under its own name."""
    yield title
    for name, text in parts.items():
        for number, line in enumerate(text.splitlines() or [""]):
            yield f"  {'' if number else name:<9}  {printable(line)}".rstrip()
