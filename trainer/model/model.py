"""The whole model: [BOS] [START] world tokens [END] … text, and the loss at the assistant's tokens.

Only the projectors are trained: float32 master weights, products under autocast. The language model runs in its own
dtype, since autocast would move some of its operations back to float32.
"""
# Axes: N samples, P projector tokens, T text tokens, D model width, L label tokens, V vocabulary, S world tokens,
# F values of a world token.

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy
from torch.profiler import record_function

from trainer.model.language_model import LanguageModel
from trainer.model.projector import Projector, Projectors

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
        reconstruction: "Reconstruction | None" = None,
    ) -> None:
        """`loss_chunk`: number of label tokens whose logits are computed at once."""
        super().__init__()
        self.language, self.projectors, self.loss_chunk = language, projectors, loss_chunk
        self.reconstruction = reconstruction
        self.num_before = 1 if begins_with_bos else 0

    def trained_modules(self) -> Iterator[tuple[str, nn.Module]]:
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


# Label tokens are taken in chunks: with a vocabulary of 262 k, a token has 1 MB of float32 logits.


def label_losses(language: LanguageModel, states_LD: Tensor, target_L: Tensor, chunk: int | None) -> Tensor:
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
    """An auxiliary loss: a linear head for each trained tower predicts the latent from last hidden states."""

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
