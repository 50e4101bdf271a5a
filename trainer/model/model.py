"""The whole model: [BOS] [START] world tokens [END] text, and the loss at the assistant's tokens.

Only the projector learns. Its master weights are float32 and its matrix products run under autocast; the language
model runs in its own dtype throughout, since autocast would put some of its operations back to float32.
"""
# Axes: N samples, C latent channels, H W latent cells, P projector tokens, T text tokens, D model width,
# L label tokens, V vocabulary.

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer.model.language_model import LanguageModel
from trainer.model.projector import Projector


@dataclass(frozen=True)
class ModelInput:
    """What one forward pass needs, as tensors."""

    latents_NCHW: Tensor
    tokens_NT: Tensor
    sample_L: Tensor
    column_L: Tensor
    target_L: Tensor

    def to(self, device: torch.device) -> "ModelInput":
        return ModelInput(**{name: tensor.to(device, non_blocking=True) for name, tensor in vars(self).items()})

    def pin_memory(self) -> "ModelInput":
        return ModelInput(**{name: tensor.pin_memory() for name, tensor in vars(self).items()})


class WorldModel(nn.Module):
    """A frozen language model that reads latents through a projector."""

    def __init__(self, language: LanguageModel, projector: Projector, *, begins_with_bos: bool) -> None:
        super().__init__()
        self.language, self.projector = language, projector
        self.num_before = 1 if begins_with_bos else 0
        """Text tokens that stand before START."""

    def sequence(self, latents_NCHW: Tensor, tokens_NT: Tensor) -> Tensor:
        """Embed what enters the decoder: [N, P + T, D] in the language model's dtype."""
        dtype = self.language.dtype
        with torch.autocast(latents_NCHW.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            world_NPD = self.projector(latents_NCHW)
        text_NTD = self.language.embed(tokens_NT)
        before, after = text_NTD[:, : self.num_before], text_NTD[:, self.num_before :]
        return torch.cat([before, world_NPD.to(dtype), after], 1)

    def label_logits(self, batch: ModelInput) -> Tensor:
        """Compute the logits that predict every label token: [L, V] float32.

        Text token t > 0 stands at P + t, after BOS, START, world tokens and END; the position before predicts it.
        """
        hidden_NTD = self.language.hidden(self.sequence(batch.latents_NCHW, batch.tokens_NT))
        predicting_L = batch.column_L + (self.projector.num_tokens - 1)
        return self.language.logits(hidden_NTD[batch.sample_L, predicting_L]).float()

    def forward(self, batch: ModelInput) -> Tensor:
        """Compute the cross entropy of every label token, in float32: [L]."""
        return cross_entropy(self.label_logits(batch), batch.target_L, reduction="none")

    def score(self, batch: ModelInput) -> Tensor:
        """Compute the cross entropy of every label token, and whether it is the likeliest one: [2, L]."""
        logits_LV = self.label_logits(batch)
        loss_L = cross_entropy(logits_LV, batch.target_L, reduction="none")
        return torch.stack([loss_L, (logits_LV.argmax(1) == batch.target_L).float()])
