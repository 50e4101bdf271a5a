"""The loss at label tokens, and an auxiliary loss that predicts the latent.

Label tokens are taken in chunks: with a vocabulary of 262 k, a token has 1 MB of float32 logits. The auxiliary loss is
of a linear head on the last hidden states at the world tokens of a trained projector.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from trainer.model.language_model import LanguageModel
from trainer.model.projector import Projector, Projectors

# Axes: L label tokens, D model width, N samples, S world tokens, F values of a world token, T tokens.


def label_losses(language: LanguageModel, states_LD: Tensor, target_L: Tensor, chunk: int | None) -> Tensor:
    """Compute the cross entropy of every label token, in float32: [L]."""
    if chunk is None or chunk >= len(target_L):
        return cross_entropy(language.logits(states_LD).float(), target_L, reduction="none")
    with language.whole_head():
        losses_L: Tensor = ChunkedLoss.apply(states_LD, target_L, language, chunk)  # type: ignore[no-untyped-call]
    return losses_L


class ChunkedLoss(torch.autograd.Function):
    """Keeps each token's gradient in place of its logits."""

    @staticmethod
    def forward(ctx: Any, states_LD: Tensor, target_L: Tensor, language: LanguageModel, chunk: int) -> Tensor:
        losses, gradients = list[Tensor](), list[Tensor]()
        for states_CD, target_C in zip(torch.split(states_LD, chunk), torch.split(target_L, chunk), strict=True):
            with torch.set_grad_enabled(ctx.needs_input_grad[0]):
                leaf_CD = states_CD.detach().requires_grad_(ctx.needs_input_grad[0])
                loss_C = cross_entropy(language.logits(leaf_CD).float(), target_C, reduction="none")
                if ctx.needs_input_grad[0]:
                    gradients += torch.autograd.grad(loss_C.sum(), leaf_CD)
            losses.append(loss_C.detach())
        if gradients:
            ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_LD,) = ctx.saved_tensors
        return (gradient_LD * outer[0][:, None]).to(gradient_LD.dtype), None, None, None


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda predicted_NSF, latent_NSF: 1 - cosine_similarity(predicted_NSF, latent_NSF, dim=-1),
    "mse": lambda predicted_NSF, latent_NSF: (predicted_NSF - latent_NSF).square().mean(-1),
}
"""The loss of each world token: [N, S]."""


class Reconstruction(nn.Module):
    """A linear head for each tower whose latent is predicted."""

    def __init__(self, projectors: Projectors, width: int, kind: str, num_before: int, seed: int) -> None:
        """`num_before`: number of tokens before the first tower's."""
        super().__init__()
        self.loss = KINDS[kind]
        self.num_before = num_before
        heads = dict[str, nn.Module]()
        generator = torch.Generator().manual_seed(seed)
        for name, each in projectors.items():
            if is_reconstructed(each):
                heads[name] = head = nn.Linear(width, each.num_features)
                nn.init.normal_(head.weight, std=width**-0.5, generator=generator)
                nn.init.zeros_(head.bias)
        self.heads = nn.ModuleDict(heads)

    def forward(self, hidden_NTD: Tensor, latents: Mapping[str, Tensor], projectors: Projectors) -> Tensor:
        """Compute each sample's loss, a mean over its world tokens, in float32: [N]."""
        losses, place, heads = [], self.num_before, dict(self.heads.items())
        for name, tower in projectors.items():
            count, margin = tower.count(latents[name]), tower.num_ends // 2
            if name in heads:
                assert isinstance(tower, Projector), "as is_reconstructed has checked"
                world_NSD = hidden_NTD[:, place + margin : place + margin + count]
                with torch.no_grad():
                    latent_NSF = tower.features(latents[name])
                losses.append(self.loss(heads[name](world_NSD.float()), latent_NSF).mean(1))
            place += count + tower.num_ends
        return torch.stack(losses).mean(0)


def is_reconstructed(tower: nn.Module) -> bool:
    return isinstance(tower, Projector) and any(each.requires_grad for each in tower.parameters())
