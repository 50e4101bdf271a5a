"""A multimodal checkpoint's own projector, which reads cached hidden states of the checkpoint's vision tower.

Gemma 3's projector pools the tower's tokens, divides each by its root mean square, and multiplies it by one matrix.
Hidden states are not standardised. A cache may hold pooled ones.
"""

from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from cache_store.errors import ModelError
from trainer.model.projector import TowerProjector

# Axes: N samples, S world tokens, F features of a hidden state, D model width.


@dataclass(frozen=True, kw_only=True)
class ImageParts:
    """A multimodal checkpoint's image parts without its vision tower; float32 on the CPU."""

    weight_FD: Tensor
    norm_F: Tensor
    norm_eps: float
    patches: int
    """Tokens of the vision tower."""
    tokens: int
    """Tokens of an image after pooling."""
    boi: int
    """Id of the token that begins an image."""
    eoi: int
    """Id of the token that ends an image."""


def find_image_parts(whole: Any) -> ImageParts | None:
    """Find the image parts in transformers' model; None if their kind is unknown."""
    named = (each for each in whole.modules() if type(each).__name__ == "Gemma3MultiModalProjector")
    if (projector := next(named, None)) is None:
        return None
    return ImageParts(
        weight_FD=copy_to_cpu(projector.mm_input_projection_weight),
        norm_F=copy_to_cpu(projector.mm_soft_emb_norm.weight),
        norm_eps=projector.mm_soft_emb_norm.eps,
        patches=projector.patches_per_image**2,
        tokens=projector.tokens_per_side**2,
        boi=whole.config.boi_token_index,
        eoi=whole.config.eoi_token_index,
    )


def copy_to_cpu(weight: Tensor) -> Tensor:
    # A rank without values gets rank 0's later.
    return torch.zeros(weight.shape) if weight.is_meta else weight.detach().float().cpu()


class PretrainedProjector(TowerProjector):
    """Gemma 3's own projector, equal to transformers' Gemma3MultiModalProjector."""

    def __init__(
        self,
        *,
        sample_shape: tuple[int, ...],
        width: int,
        num_world_tokens: int,
        norm_eps: float,
        ends: Tensor | Literal["learned"] | None,
    ) -> None:
        held, features = sample_shape
        super().__init__(num_world_tokens=num_world_tokens, num_features=features, width=width, ends=ends)
        self.side, self.pooled = isqrt(held), isqrt(held) // isqrt(num_world_tokens)
        self.norm_eps = norm_eps
        self.norm = nn.Parameter(torch.empty(features))
        self.weight = nn.Parameter(torch.empty(features, width))

    @torch.no_grad()
    def take_weights(self, parts: ImageParts, generator: torch.Generator) -> None:
        self.norm.copy_(parts.norm_F)
        self.weight.copy_(parts.weight_FD)
        if isinstance(self.ends, nn.Parameter):
            nn.init.normal_(self.ends, generator=generator)

    def world_tokens(self, samples: Tensor) -> Tensor:
        states_NSF = self.pool(samples.float())
        scale_NS1 = torch.rsqrt(states_NSF.pow(2).mean(-1, keepdim=True) + self.norm_eps)
        return states_NSF * scale_NS1 * (1 + self.norm) @ self.weight

    def pool(self, states_NSF: Tensor) -> Tensor:
        if self.pooled == 1:
            return states_NSF
        count, _, features = states_NSF.shape
        grid_NFYX = states_NSF.transpose(1, 2).reshape(count, features, self.side, self.side)
        return avg_pool2d(grid_NFYX, self.pooled).flatten(2).transpose(1, 2)


def refuse_other_states(parts: ImageParts, sample_shape: tuple[int, ...], where: str) -> None:
    features = parts.weight_FD.shape[0]
    if sample_shape not in {(parts.patches, features), (parts.tokens, features)}:
        raise ModelError(
            f"{where} holds {list(sample_shape)} for each image; the checkpoint's own projector reads its vision "
            f"tower's hidden states, [{parts.patches}, {features}], or pooled ones, [{parts.tokens}, {features}]"
        )
