"""An auxiliary loss: from the language model's last hidden states at world tokens, a linear head predicts the latent.

It asks the language model to keep what an image shows. Only trained projectors that standardise their samples have
one: others learn nothing from it, or have no standardised sample to predict.
"""
# Axes: N samples, P projector tokens, T text tokens, S world tokens, F values of a world token, D model width.

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from trainer.model.projectors.joined import Projectors
from trainer.model.projectors.projector import Projector

KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda predicted_NSF, latent_NSF: 1 - cosine_similarity(predicted_NSF, latent_NSF, dim=-1),
    "mse": lambda predicted_NSF, latent_NSF: (predicted_NSF - latent_NSF).square().mean(-1),
}
"""Loss of each world token, [N, S]."""


class Reconstruction(nn.Module):
    """A linear head for each tower that has a latent to predict."""

    def __init__(self, projectors: Projectors, width: int, kind: str, num_before: int, seed: int) -> None:
        """`num_before` tokens stand before the first tower's."""
        super().__init__()
        self.loss = KINDS[kind]
        self.first: dict[str, int] = {}
        """Place of each tower's first world token in the sequence."""
        heads = dict[str, nn.Module]()
        generator, place = torch.Generator().manual_seed(seed), num_before
        for name, each in projectors.items():
            if is_reconstructed(each):
                self.first[name] = place + (each.num_tokens - each.num_world_tokens) // 2
                heads[name] = head = nn.Linear(width, each.num_features)
                nn.init.normal_(head.weight, std=width**-0.5, generator=generator)
                nn.init.zeros_(head.bias)
            place += each.num_tokens
        self.heads = nn.ModuleDict(heads)

    def forward(self, hidden_NTD: Tensor, latents: Mapping[str, Tensor], projectors: Projectors) -> Tensor:
        """Compute each sample's loss, a mean over its world tokens, in float32: [N]."""
        losses = []
        for name, head in self.heads.items():
            tower = projectors[name]
            assert isinstance(tower, Projector), "as is_reconstructed has checked"
            first, last = self.first[name], self.first[name] + tower.num_world_tokens
            with torch.no_grad():
                latent_NSF = tower.features(latents[name])
            losses.append(self.loss(head(hidden_NTD[:, first:last].float()), latent_NSF).mean(1))
        return torch.stack(losses).mean(0)


def is_reconstructed(tower: nn.Module) -> bool:
    return isinstance(tower, Projector) and any(each.requires_grad for each in tower.parameters())
