"""Figures, validations and captions of a run's steps, and how answers are shown to people."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
        return {name: value for name, value in vars(self).items() if name != "preview"}

    @property
    def parts(self) -> dict[str, str]:
        """Return prompt, answer and reference as they are shown."""
        answer = {"prompt": self.prompt, "answer": shown_answer(self.text, is_whole=self.is_whole)}
        return answer if self.reference is None else answer | {"reference": self.reference}


Captioner = Callable[[Callable[[], bool]], list[Caption]]
"""Captions the run's samples; ends early, with any result, once the function that it is given returns True."""


@dataclass(frozen=True)
class Validation:
    """The result of one validation; empty if none was due."""

    metrics: Metrics = field(default_factory=dict)
    captions: Sequence[Caption] = ()
    summary: str = ""
    """The figures in words, for the terminal."""


def shown_answer(text: str, *, is_whole: bool) -> str:
    """Return an answer as shown: `(nothing)` if it is empty, with `[…]` if it was cut short."""
    return (text + ("" if is_whole else " […]")) if text else "(nothing)"


def answer_lines(title: str, parts: dict[str, str]) -> Iterator[str]:
    """Yield a title, then each part's lines with its name in front."""
    yield title
    for name, text in parts.items():
        for number, line in enumerate(text.splitlines() or [""]):
            yield f"  {'' if number else name:<9}  {printable(line)}".rstrip()
