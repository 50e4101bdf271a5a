"""What the language model says of a few held-out samples as the run goes on, beside what the cache has for them."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from cache_store.refusal import printable

PREVIEW_SIDE = 224
"""Least pixels of a preview's longest side in TensorBoard, which shows small pictures small."""

NOTHING = "(nothing)"
"""Shown in the place of an empty answer."""


@dataclass(frozen=True, kw_only=True)
class Caption:
    """One answer, to the sample's own first question."""

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
        """What the log keeps of it."""
        return {name: value for name, value in vars(self).items() if name != "preview"}

    @property
    def shown_text(self) -> str:
        return shown_answer(self.text, is_whole=self.is_whole)

    def lines(self) -> Iterator[str]:
        reference = {} if self.reference is None else {"reference": self.reference}
        return answer_lines(f"row {self.row}, {printable(self.id)}", {"answer": self.shown_text} | reference)

    def preview_png(self) -> tuple[int, int, bytes] | None:
        """Height, width and PNG of the preview, every cell a square of pixels."""
        if self.preview is None:
            return None
        image = Image.fromarray(self.preview)
        scale = -(-PREVIEW_SIDE // max(image.size))
        image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
        stream = io.BytesIO()
        image.save(stream, "PNG")
        return image.height, image.width, stream.getvalue()


Captioner = Callable[[Callable[[], bool]], list[Caption]]
"""Captions the run's samples; ends early, with anything, where the function that it is given says so."""


def shown_answer(text: str, *, is_whole: bool) -> str:
    """Show an answer that may be empty, or cut short."""
    return (text or NOTHING) + ("" if is_whole else " […]")


def answer_lines(title: str, parts: dict[str, str]) -> Iterator[str]:
    """Lay out words under the name of their image, each part under its own name."""
    yield title
    for name, text in parts.items():
        for number, line in enumerate(text.splitlines() or [""]):
            yield f"  {'' if number else name:<9}  {printable(line)}".rstrip()
