"""The whole model: [BOS] [START] world tokens [END] … text, and the loss at the assistant's tokens.

Only the projectors learn. Their master weights are float32 and its matrix products run under autocast; the language
model runs in its own dtype throughout, since autocast would put some of its operations back to float32.
"""
# Axes: N samples, P projector tokens, T text tokens, D model width, L label tokens, V vocabulary.

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer.model.attention import CAUSAL
from trainer.model.language.language_model import LanguageModel
from trainer.model.loss import label_losses
from trainer.model.phases import phase
from trainer.model.projectors.joined import Projectors


@dataclass(frozen=True)
class ModelInput:
    """What one forward pass needs, as tensors."""

    latents: Mapping[str, Tensor]
    """Each tower's samples, by its name: [N, *shape]."""
    tokens_NT: Tensor
    sample_L: Tensor
    column_L: Tensor
    target_L: Tensor

    def to(self, device: torch.device) -> "ModelInput":
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "ModelInput":
        return self._map(Tensor.pin_memory)

    def _map(self, move: Callable[[Tensor], Tensor]) -> "ModelInput":
        text = {name: move(value) for name, value in vars(self).items() if name != "latents"}
        return ModelInput(latents={name: move(each) for name, each in self.latents.items()}, **text)


class WorldModel(nn.Module):
    """A frozen language model that reads each tower's samples through a projector."""

    def __init__(
        self, language: LanguageModel, projectors: Projectors, *, begins_with_bos: bool, loss_chunk: int | None = None
    ) -> None:
        """`loss_chunk`: label tokens whose logits are made at once."""
        super().__init__()
        self.language, self.projectors, self.loss_chunk = language, projectors, loss_chunk
        self.num_before = 1 if begins_with_bos else 0
        """Text tokens that stand before the first tower's."""

    def sequence(self, latents: Mapping[str, Tensor], tokens_NT: Tensor) -> Tensor:
        """Embed what enters the decoder: [N, P + T, D] in the language model's dtype."""
        dtype = self.language.dtype
        with (
            phase("projector"),
            torch.autocast(tokens_NT.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16),
        ):
            world_NPD = self.projectors.tokens(latents)
        with phase("embedding"):
            text_NTD = self.language.embed(tokens_NT)
        before, after = text_NTD[:, : self.num_before], text_NTD[:, self.num_before :]
        return torch.cat([before, *(each.to(dtype) for each in world_NPD), after], 1)

    def blocks(self, tokens_NT: Tensor) -> Tensor | None:
        """Tell which tokens of a sequence see each other, as `image_masks` takes it: [1, P + T]; None where none do."""
        if not self.projectors.full:
            return None
        text = [CAUSAL] * tokens_NT.shape[1]
        block = [*text[: self.num_before], *self.projectors.blocks(), *text[self.num_before :]]
        return torch.tensor([block], device=tokens_NT.device)

    def hidden(self, latents: Mapping[str, Tensor], tokens_NT: Tensor) -> Tensor:
        """Compute the decoder's last hidden states: [N, P + T, D]."""
        sequence_NTD, block_1T = self.sequence(latents, tokens_NT), self.blocks(tokens_NT)
        with phase("decoder"):
            return self.language.hidden(sequence_NTD, block_1T)

    def label_states(self, batch: ModelInput) -> Tensor:
        """Compute the hidden states that predict every label token: [L, D].

        Text token t > 0 stands at P + t, after BOS and all towers' tokens; the position before predicts it.
        """
        hidden_NTD = self.hidden(batch.latents, batch.tokens_NT)
        predicting_L = batch.column_L + (self.projectors.num_tokens - 1)
        return hidden_NTD[batch.sample_L, predicting_L]

    def forward(self, batch: ModelInput) -> Tensor:
        """Compute the cross entropy of every label token, in float32: [L]."""
        states_LD = self.label_states(batch)
        with phase("logits and loss"):
            return label_losses(self.language, states_LD, batch.target_L, self.loss_chunk)

    def score(self, batch: ModelInput) -> Tensor:
        """Compute the cross entropy of every label token, and whether it is the likeliest one: [2, L]."""
        states_LD, chunk = self.label_states(batch), self.loss_chunk or len(batch.target_L)
        parts = zip(torch.split(states_LD, chunk), torch.split(batch.target_L, chunk), strict=True)
        with self.language.whole_head():
            return torch.cat([score_part(self.language, *part) for part in parts], 1)


def score_part(language: LanguageModel, states_LD: Tensor, target_L: Tensor) -> Tensor:
    logits_LV = language.logits(states_LD).float()
    loss_L = cross_entropy(logits_LV, target_L, reduction="none")
    return torch.stack([loss_L, (logits_LV.argmax(1) == target_L).float()])
