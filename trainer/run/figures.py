"""Figures, validations and captions of a run's steps, and how answers are shown to people."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from cache_store.messages import printable

Metrics = dict[str, float | int]
"""Figures by name."""

PARTS = ("prompt", "answer", "reference")


@dataclass(frozen=True)
class Subject:
    """One image, and what the model is asked about it."""

    title: str
    image: dict[str, Any]
    """Row and id, or the file."""
    messages: list[dict[str, str]]
    reference: str | None
    """The cache's own answer."""
    samples: dict[str, Tensor]
    """Each tower's sample [*shape], by its name."""


@dataclass(frozen=True)
class Answered:
    """The language model's answer about one image."""

    subject: Subject
    answer: str
    is_whole: bool
    """Whether the model ended its turn within the token limit."""
    preview: np.ndarray | None = None
    """The latent through the cache's linear map to RGB, uint8 [H, W, 3]."""

    @property
    def record(self) -> dict[str, Any]:
        asked, reference = self.subject.messages, self.subject.reference
        exchange = {"prompt": "\n".join(each["content"] for each in asked), "answer": self.answer}
        referred = {} if reference is None else {"reference": reference}
        return {**self.subject.image, **exchange, **referred, "is_whole": self.is_whole}

    @property
    def parts(self) -> dict[str, str]:
        shown = (self.answer + " […]" * (not self.is_whole)) if self.answer else "(nothing)"
        return {name: text for name, text in (self.record | {"answer": shown}).items() if name in PARTS}

    def lines(self, names: Sequence[str] = PARTS) -> Iterator[str]:
        yield self.subject.title
        for name, text in self.parts.items():
            for number, line in enumerate(text.splitlines() or [""] if name in names else []):
                yield f"  {'' if number else name:<9}  {printable(line)}".rstrip()


Captioner = Callable[[Callable[[], bool]], list[Answered]]
"""Captions the run's samples; ends early once the function that it is given returns True."""


@dataclass(frozen=True)
class Validation:
    """The result of one validation; empty if none was due."""

    metrics: Metrics = field(default_factory=dict)
    captions: Sequence[Answered] = ()
    summary: str = ""
    """The figures in words, for the terminal."""
