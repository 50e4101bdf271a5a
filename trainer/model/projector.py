"""The projector: standardised latents into tokens of the language model's width.

At initialisation its tokens have the root mean square of the model's own token embeddings: a frozen decoder
normalises what enters, so tokens much smaller than it expects would make gradients larger by the same factor.
"""
# Axes: N samples, C latent channels, H W latent cells, S world tokens, F values of a world token, D model width.

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cache_store import CacheError

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "spatial": lambda latents_NCHW: latents_NCHW.flatten(2).transpose(1, 2),
    "channel": lambda latents_NCHW: latents_NCHW.flatten(2),
}
"""Latents as world tokens [N, S, F]."""

SHAPES: dict[str, Callable[[int, int], list[nn.Module]]] = {
    "linear": lambda features, width: [nn.Linear(features, width)],
    "mlp": lambda features, width: [nn.Linear(features, width), nn.GELU(), nn.Linear(width, width)],
    "mlp_gelu": lambda features, width: [
        nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
    ],
}  # fmt: skip

CALIBRATION_TOKENS = 4_096
SEARCH_STEPS = 40


class Projector(nn.Module):
    """World tokens between two learned vectors, START and END."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        *,
        latent_shape: tuple[int, ...],
        width: int,
        layout: str,
        shape: str,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
    ) -> None:
        """`latent_shape` is [C, H, W]; `mean` and `std` are per channel; of posterior moments the mean half is read."""
        super().__init__()
        _, height, cells_x = latent_shape
        tokens, features = (height * cells_x, len(mean)) if layout == "spatial" else (len(mean), height * cells_x)
        self.layout, self.num_world_tokens, self.num_features = layout, tokens, features
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32)[:, None, None])
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32)[:, None, None])
        self.layers = nn.Sequential(*SHAPES[shape](features, width))
        self.ends = nn.Parameter(torch.empty(2, width))
        if not self.ends.is_meta:  # as it is where trained weights are to come
            self._initialise(torch.Generator().manual_seed(seed))

    @property
    def num_tokens(self) -> int:
        """World tokens, START and END."""
        return self.num_world_tokens + 2

    def _initialise(self, generator: torch.Generator) -> None:
        """Variance-preserving weights, no biases, from our own generator: the same in every process."""
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
                nn.init.zeros_(layer.bias)
        nn.init.normal_(self.ends, generator=generator)

    def features(self, latents_NCHW: Tensor) -> Tensor:
        """Standardised latents as tokens: [N, S, F] float32."""
        latents_NCHW = latents_NCHW[:, : len(self.mean)].float()
        return LAYOUTS[self.layout]((latents_NCHW - self.mean) / self.std)

    def forward(self, latents_NCHW: Tensor) -> Tensor:
        """START, world tokens, END: [N, S + 2, D]."""
        world_NSD = self.layers(self.features(latents_NCHW))
        start_ND, end_ND = self.ends.to(world_NSD.dtype).expand(len(world_NSD), 2, -1).unbind(1)
        return torch.cat([start_ND[:, None], world_NSD, end_ND[:, None]], 1)

    @torch.no_grad()
    def match_rms(self, latents_NCHW: Tensor, target: float) -> None:
        """Scale the last matrix and the ends such that the output has the root mean square `target`."""
        self.refuse_statistics()
        refuse_nonfinite_latents(latents_NCHW[:, : len(self.mean)])
        features_SF = self.features(latents_NCHW).flatten(0, 1)
        features_SF = features_SF[:: -(-len(features_SF) // CALIBRATION_TOKENS)]
        last = max(index for index, layer in enumerate(self.layers) if isinstance(layer, nn.Linear))
        before, after = self.layers[: last + 1](features_SF), self.layers[last + 1 :]
        if not rms(before) > 0:
            raise CacheError("the cache's latents are all equal to their mean; there is nothing to learn from them")
        matrix = self.layers[last]
        assert isinstance(matrix, nn.Linear)
        matrix.weight.mul_(find_scale(lambda scale: rms(after(scale * before)), target))
        self.ends.mul_(target / rms(self.ends))

    def refuse_statistics(self) -> None:
        """Raise CacheError for channels that cannot be standardised."""
        statistics = zip(self.mean.flatten().tolist(), self.std.flatten().tolist(), strict=True)
        for channel, (mean, std) in enumerate(statistics):
            if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
                raise CacheError(
                    f"latent channel {channel} cannot be standardised: its mean is {mean}, its standard deviation "
                    f"{std}; both are the encoder's own where its config states them, else measured over the cache"
                )


def refuse_nonfinite_latents(latents_NCHW: Tensor) -> None:
    """Raise CacheError for NaN and infinity: the check for latents that are all equal would not tell them apart."""
    faulty = int((~latents_NCHW.isfinite()).flatten(1).any(1).sum())
    if faulty:
        raise CacheError(
            f"{faulty} of the {len(latents_NCHW)} samples that set the projector's scale hold NaN or infinity; "
            "`cache-store verify CACHE --level deep` names all such samples"
        )


def rms(values: Tensor) -> float:
    return float(values.detach().double().square().mean().sqrt())


def find_scale(rms_at: Callable[[float], float], target: float) -> float:
    """Find the scale at which a growing `rms_at` reaches `target`, by bisection of its logarithm; exact to 1e-9."""
    low, high = -30.0, 30.0
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if rms_at(2.0**middle) < target else (low, middle)
    return float(2.0**low)
