"""The whole model: [BOS] [START] world tokens [END] … text, and the loss at the assistant's tokens.

Only the projectors are trained: float32 master weights, products under autocast. The language model runs in its own
dtype, since autocast would move some of its operations back to float32.
"""
# Axes: N samples, P projector tokens, T text tokens, D model width, L label tokens, V vocabulary.

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import record_function

from trainer.model.language_model import LanguageModel
from trainer.model.loss import Reconstruction, label_losses
from trainer.model.projector import Projectors

RECONSTRUCTION = "reconstruction"
"""Name of its heads among the trained modules."""

PREFIX = "trainer: "

Phase = Literal[
    "data wait", "host to device", "forward", "projector", "embedding", "decoder", "attention", "MLP", "norms",
    "logits and loss", "reconstruction", "backward", "communication", "optimizer", "bookkeeping",
]  # fmt: skip


def phase(name: Phase) -> record_function:
    """Mark a block's operations for the profiler; an inner block has its own phase. Costs microseconds."""
    return record_function(PREFIX + name)


@dataclass(frozen=True)
class ModelInput:
    """The tensors of one forward pass."""

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
        self,
        language: LanguageModel,
        projectors: Projectors,
        *,
        begins_with_bos: bool,
        loss_chunk: int | None = None,
        reconstruction: Reconstruction | None = None,
    ) -> None:
        """`loss_chunk`: number of label tokens whose logits are computed at once."""
        super().__init__()
        self.language, self.projectors, self.loss_chunk = language, projectors, loss_chunk
        self.reconstruction = reconstruction
        self.num_before = 1 if begins_with_bos else 0

    def trained_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield by name what may be trained: each tower's projector, and the heads of reconstruction."""
        yield from self.projectors.items()
        if self.reconstruction is not None:
            yield RECONSTRUCTION, self.reconstruction

    def sequence(self, latents: Mapping[str, Tensor], tokens_NT: Tensor) -> Tensor:
        """Embed the decoder's input: [N, P + T, D] in the language model's dtype."""
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

    def blocks(self, tokens_NT: Tensor, latents: Mapping[str, Tensor] | None = None) -> Tensor | None:
        """Return each token's block for `image_masks`, [1, P + T]; None if every tower is causal."""
        block = self.projectors.blocks(tokens_NT.shape[1], self.num_before, latents)
        return None if block is None else torch.tensor([block], device=tokens_NT.device)

    def hidden(self, latents: Mapping[str, Tensor], tokens_NT: Tensor) -> Tensor:
        """Compute the decoder's last hidden states: [N, P + T, D]."""
        sequence_NTD, block_1T = self.sequence(latents, tokens_NT), self.blocks(tokens_NT, latents)
        with phase("decoder"):
            return self.language.hidden(sequence_NTD, block_1T)

    def label_states(self, hidden_NTD: Tensor, batch: ModelInput) -> Tensor:
        """Select the hidden states that predict the label tokens: [L, D]."""
        world_tokens = hidden_NTD.shape[1] - batch.tokens_NT.shape[1]
        return hidden_NTD[batch.sample_L, batch.column_L + world_tokens - 1]  # the position before the token's own

    def forward(self, batch: ModelInput) -> Tensor:
        return self.losses(batch)[0]

    def losses(self, batch: ModelInput, *, reconstructed: bool = False) -> tuple[Tensor, Tensor | None]:
        """Compute the cross entropy of every label token, [L], and each sample's reconstruction loss, [N]."""
        hidden_NTD = self.hidden(batch.latents, batch.tokens_NT)
        states_LD = self.label_states(hidden_NTD, batch)
        with phase("logits and loss"):
            loss_L = label_losses(self.language, states_LD, batch.target_L, self.loss_chunk)
        if self.reconstruction is None or not reconstructed:
            return loss_L, None
        with phase("reconstruction"):
            return loss_L, self.reconstruction(hidden_NTD, batch.latents, self.projectors)

    def score(self, batch: ModelInput) -> Tensor:
        """Compute the cross entropy of every label token, and whether it is the likeliest token: [2, L]."""
        hidden_NTD, chunk = self.hidden(batch.latents, batch.tokens_NT), self.loss_chunk or len(batch.target_L)
        states_LD = self.label_states(hidden_NTD, batch)
        parts, scores = zip(torch.split(states_LD, chunk), torch.split(batch.target_L, chunk), strict=True), []
        with self.language.whole_head():
            for states_CD, target_C in parts:
                logits_CV = self.language.logits(states_CD).float()
                loss_C = cross_entropy(logits_CV, target_C, reduction="none")
                scores.append(torch.stack([loss_C, (logits_CV.argmax(1) == target_C).float()]))
        return torch.cat(scores, 1)
