"""Projectors: turn a tower's standardised samples into tokens of the language model's width.

At the start, tokens have the root mean square of the model's own token embeddings. A frozen decoder normalises its
input, so tokens ten times too small would make gradients ten times too large.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from cache_store import CacheError

# Axes: N samples, C latent channels, H W latent cells, S world tokens, F values of one, D model width, P all tokens.
# A sample is a latent [C, H, W], of clips [C, T, H, W], or already tokens [S, F]: features are then as channels.


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "spatial": lambda latents_NCHW: latents_NCHW.flatten(2).transpose(1, 2),
    "channel": lambda latents_NCHW: latents_NCHW.flatten(2),
    "token": lambda tokens_NSF: tokens_NSF,
}
"""For each layout, the function that turns samples into world tokens [N, S, F]."""

SHAPES: dict[str, Callable[[int, int], list[nn.Module]]] = {
    "linear": lambda features, width: [nn.Linear(features, width)],
    "mlp": lambda features, width: [nn.Linear(features, width), nn.GELU(), nn.Linear(width, width)],
    "mlp_gelu": lambda features, width: [
        nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
    ],
}  # fmt: skip

CAUSAL = -1
"""Block of a token that attends only to itself and to earlier tokens."""

CALIBRATION_TOKENS = 4_096
SEARCH_STEPS = 40


class TowerProjector(nn.Module):
    """Turns one tower's samples into tokens, between START and END if it has them."""

    ends: Tensor | None
    """START and END, [2, D], learned or the checkpoint's own; None without."""

    def __init__(
        self, *, num_world_tokens: int, num_features: int, width: int, ends: Tensor | Literal["learned"] | None
    ) -> None:
        super().__init__()
        self.num_world_tokens, self.num_features = num_world_tokens, num_features
        if isinstance(ends, str):
            self.ends = nn.Parameter(torch.empty(2, width))
        else:
            self.register_buffer("ends", ends)

    @property
    def num_tokens(self) -> int:
        return self.num_world_tokens + self.num_ends

    @property
    def num_ends(self) -> int:
        return 0 if self.ends is None else 2

    def count(self, samples: Tensor) -> int:
        return self.num_world_tokens

    def world_tokens(self, samples: Tensor) -> Tensor:
        """Turn samples [N, *shape] into world tokens [N, S, D]."""
        raise NotImplementedError

    def forward(self, samples: Tensor) -> Tensor:
        """Return START, world tokens and END: [N, S + 2, D]; without ends [N, S, D]."""
        world_NSD = self.world_tokens(samples)
        if self.ends is None:
            return world_NSD
        start_ND, end_ND = self.ends.to(world_NSD.dtype).expand(len(world_NSD), 2, -1).unbind(1)
        return torch.cat([start_ND[:, None], world_NSD, end_ND[:, None]], 1)

    def match_rms(self, samples: Tensor, target: float) -> None:
        """Scale random weights so that the output's root mean square is `target`."""
        self.match_ends(target)

    @torch.no_grad()
    def match_ends(self, target: float) -> None:
        if isinstance(self.ends, nn.Parameter):
            self.ends.mul_(target / rms(self.ends))


class Projector(TowerProjector):
    """Standardises samples and applies one or two matrices, random at first."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        *,
        sample_shape: tuple[int, ...],
        width: int,
        layout: str,
        shape: str,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
        ends: Tensor | Literal["learned"] | None = "learned",
    ) -> None:
        """Take the largest shape of samples, and mean and std of each channel or feature that is read."""
        rows, columns = (len(mean), math.prod(sample_shape[1:])) if layout != "token" else sample_shape
        tokens, features = (columns, rows) if layout == "spatial" else (rows, columns)
        super().__init__(num_world_tokens=tokens, num_features=features, width=width, ends=ends)
        self.layout = layout
        over_cells = (-1,) if layout == "token" else (-1, *[1] * (len(sample_shape) - 1))
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(over_cells))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(over_cells))
        self.layers = nn.Sequential(*SHAPES[shape](features, width))
        if not self.mean.is_meta:  # on the meta device, trained weights will be loaded instead
            self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        """Draw variance-preserving weights and zero biases, the same in every process."""
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
                nn.init.zeros_(layer.bias)
        if isinstance(self.ends, nn.Parameter):
            nn.init.normal_(self.ends, generator=generator)

    def read(self, samples: Tensor) -> Tensor:
        """Return the part of samples that is read: of posterior moments, the means."""
        return samples if self.layout == "token" else samples[:, : len(self.mean)]

    def count(self, samples: Tensor) -> int:
        return {"spatial": samples[0, 0].numel(), "token": samples.shape[1]}.get(self.layout, self.num_world_tokens)

    def features(self, samples: Tensor) -> Tensor:
        """Standardise samples and arrange them as tokens: [N, S, F] float32."""
        return LAYOUTS[self.layout]((self.read(samples).float() - self.mean) / self.std)

    def world_tokens(self, samples: Tensor) -> Tensor:
        world_NSD: Tensor = self.layers(self.features(samples))
        return world_NSD

    @torch.no_grad()
    def match_rms(self, samples: Tensor, target: float) -> None:
        """Scale the last matrix and the ends so that the output's root mean square is `target`."""
        features_SF = self.features(samples).flatten(0, 1)
        features_SF = features_SF[:: -(-len(features_SF) // CALIBRATION_TOKENS)]
        last = max(index for index, layer in enumerate(self.layers) if isinstance(layer, nn.Linear))
        before, after = self.layers[: last + 1](features_SF), self.layers[last + 1 :]
        if not 0 < rms(before) < math.inf:
            raise CacheError(
                f"the {len(samples)} samples that set the projector's scale hold NaN or infinity, or are all equal to "
                "their mean: see what `cache-store verify CACHE --level deep` says of them"
            )
        matrix = self.layers[last]
        assert isinstance(matrix, nn.Linear)
        matrix.weight.mul_(find_scale(lambda scale: rms(after(scale * before)), target))
        self.match_ends(target)


def rms(values: Tensor) -> float:
    return float(values.detach().double().square().mean().sqrt())


def find_scale(rms_at: Callable[[float], float], target: float) -> float:
    """Find where the increasing `rms_at` reaches `target`, by bisection of the scale's logarithm."""
    low, high = -30.0, 30.0
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if rms_at(2.0**middle) < target else (low, middle)
    return float(2.0**low)


class Projectors(nn.Module):
    """All towers' projectors; their tokens stand between BOS and the text, tower after tower."""

    def __init__(self, towers: Mapping[str, TowerProjector], full: frozenset[str] = frozenset()) -> None:
        """`full` names the towers whose tokens attend to each other."""
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

    def count(self, samples: Mapping[str, Tensor]) -> int:
        return sum(each.count(samples[name]) + each.num_ends for name, each in self.items())

    def tokens(self, samples: Mapping[str, Tensor]) -> list[Tensor]:
        return [each(samples[name]) for name, each in self.items()]

    def forward(self, samples: Mapping[str, Tensor]) -> Tensor:
        """Return all towers' tokens, [N, P, D]."""
        return torch.cat(self.tokens(samples), 1)

    def blocks(
        self, text_tokens: int, num_before: int, samples: Mapping[str, Tensor] | None = None
    ) -> list[int] | None:
        """Return the block of each token of a sequence: the tower's number in a full tower; None if all are CAUSAL.

        World tokens are those of `samples`, or the most that there can be.
        """
        if not self.full:
            return None
        blocks = [CAUSAL] * num_before
        for number, (name, each) in enumerate(self.items()):
            margin = [CAUSAL] * (each.num_ends // 2)
            count = each.num_world_tokens if samples is None else each.count(samples[name])
            blocks += [*margin, *[number if name in self.full else CAUSAL] * count, *margin]
        return blocks + [CAUSAL] * (text_tokens - num_before)
