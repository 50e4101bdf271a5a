"""The loss at label tokens, a chunk of them at a time: a vocabulary of 262 k makes 1 MB of float32 logits a token."""
# Axes: L label tokens, D model width, V vocabulary.

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from trainer.model.language.language_model import LanguageModel


def label_losses(language: LanguageModel, states_LD: Tensor, target_L: Tensor, chunk: int | None) -> Tensor:
    """Compute the cross entropy of every label token, in float32: [L]."""
    if chunk is None or chunk >= len(target_L):
        return cross_entropy(language.logits(states_LD).float(), target_L, reduction="none")
    with language.whole_head():
        losses_L: Tensor = ChunkedLoss.apply(states_LD, target_L, language, chunk)  # type: ignore[no-untyped-call]
    return losses_L


class ChunkedLoss(torch.autograd.Function):
    """Keeps each token's gradient in place of its logits: a token's loss depends on its own state alone."""

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
