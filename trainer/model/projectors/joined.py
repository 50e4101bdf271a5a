"""The projectors of all towers, in the order in which the language model reads their tokens."""
# Axes: N samples, P projector tokens, D model width.

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from trainer.model.attention import CAUSAL
from trainer.model.projectors.projector import TowerProjector


class Projectors(nn.Module):
    """[tower], [tower], …: what stands between BOS and the text."""

    def __init__(self, towers: Mapping[str, TowerProjector], full: frozenset[str] = frozenset()) -> None:
        """`full` names the towers whose tokens see each other."""
        super().__init__()
        self.names, self.full = tuple(towers), full
        self._each = nn.ModuleList(towers.values())

    def __getitem__(self, name: str) -> TowerProjector:
        return dict(self.items())[name]

    def items(self) -> Iterator[tuple[str, TowerProjector]]:
        for name, each in zip(self.names, self._each, strict=True):
            assert isinstance(each, TowerProjector)
            yield name, each

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for _, each in self.items())

    def tokens(self, samples: Mapping[str, Tensor]) -> list[Tensor]:
        """Make each tower's tokens of its samples, by its name: [N, P, D]."""
        return [each(samples[name]) for name, each in self.items()]

    def forward(self, samples: Mapping[str, Tensor] | Tensor) -> Tensor:
        """All towers' tokens, [N, P, D]; samples alone are those of the only tower."""
        if isinstance(samples, Tensor):
            (name,) = self.names
            samples = {name: samples}
        return torch.cat(self.tokens(samples), 1)

    def blocks(self) -> list[int]:
        """Of each token: its tower's number, where the tokens of that tower see each other, or CAUSAL."""
        blocks = list[int]()
        for number, (name, each) in enumerate(self.items()):
            margin = [CAUSAL] * ((each.num_tokens - each.num_world_tokens) // 2)
            inside = [number if name in self.full else CAUSAL] * each.num_world_tokens
            blocks += [*margin, *inside, *margin]
        return blocks

    def sequence_blocks(self, text_tokens: int, num_before: int) -> list[int] | None:
        """Return those of a whole sequence, `num_before` text tokens of it first; None where all are CAUSAL."""
        if not self.full:
            return None
        text = [CAUSAL] * text_tokens
        return [*text[:num_before], *self.blocks(), *text[num_before:]]
