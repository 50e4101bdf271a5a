"""When the language model stops speaking, besides at a token that ends its turn."""
# Axes: N samples, T text tokens.

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria


class WordsSaid(StoppingCriteria):  # type: ignore[misc]  # transformers is not typed
    """Stops a text once it holds some words; transformers' own `stop_strings` fails on tokenizers of whole words."""

    def __init__(self, tokenizer: Any, words: str) -> None:
        self._tokenizer, self._words = tokenizer, words

    def __call__(self, said_NT: Tensor, scores: Any, **_: Any) -> Tensor:
        held = [self._words in self._tokenizer.decode(said) for said in said_NT.tolist()]
        return torch.tensor(held, device=said_NT.device)


class WhenTold(StoppingCriteria):  # type: ignore[misc]  # transformers is not typed
    """Stops all texts once it is told to."""

    def __init__(self, told: Callable[[], bool]) -> None:
        self._told = told

    def __call__(self, said_NT: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(said_NT),), self._told(), device=said_NT.device)
