"""Find which attention kernel each kind of layer runs, by running it at a run's own length."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from cache_store.errors import ConfigError
from trainer.model.language_model import LanguageModel
from trainer.model.pretrained import first_line

# Axes: T tokens, D model width.

FLASH, EFFICIENT, CUDNN, MATH = "flash", "memory-efficient", "cuDNN", "math"

KERNELS = {
    "_scaled_dot_product_flash_attention_for_cpu": FLASH,
    "_scaled_dot_product_flash_attention": FLASH,
    "_scaled_dot_product_efficient_attention": EFFICIENT,
    "_scaled_dot_product_cudnn_attention": CUDNN,
    "_softmax": MATH,
    "_safe_softmax": MATH,
}
"""Kernels by their operation; torch's math kernel shows only its softmax."""

CHOICES = {
    "flash": (SDPBackend.FLASH_ATTENTION, FLASH),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, EFFICIENT),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, CUDNN),
    "math": (SDPBackend.MATH, MATH),
}
"""For each value of run.attention: torch's backend, and the kernel that must then run."""


def choose_attention(model: LanguageModel, choice: str, tokens: int, block_1T: Tensor | None) -> None:
    """Let the model run only this kernel; ConfigError if it cannot, at a sequence of `tokens` tokens."""
    model.attention, wanted = CHOICES[choice]
    refused = f"run.attention: {choice} does not run here, at {tokens:,} tokens on this {model.device.type}"
    try:
        with warnings.catch_warnings(record=True):  # torch warns why each kernel cannot run
            found = attention_kernels(model, tokens, block_1T)
    except RuntimeError as error:
        raise ConfigError(f"{refused} ({first_line(error).rstrip('.')}); set run.attention: auto") from None
    if set(found.values()) != {wanted}:
        shown = ", ".join(f"{kind}: {kernel}" for kind, kernel in found.items()) or "unknown kernels"
        raise ConfigError(f"{refused}, which runs {shown}; set run.attention: auto")


class SeenKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the kernel of each attention operation, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in KERNELS:
            self.kernels.append(KERNELS[name])
        return func(*args, **kwargs or {})


def attention_kernels(model: LanguageModel, tokens: int, block_1T: Tensor | None = None) -> dict[str, str]:
    """Name the kernel of each kind of layer, for one sequence of `tokens` tokens; empty if they are unknown.

    Gradients are on, as in training: a kernel may have no backward pass.
    """
    kinds = getattr(model.config, "layer_types", None) or ["attention"] * len(model.layers())
    embeddings_1TD = torch.zeros(1, tokens, model.width, dtype=model.dtype, device=model.device, requires_grad=True)
    # The mode does not see into compiled layers, and layers that ran under it would not be compiled later.
    with torch.compiler.set_stance("force_eager"), SeenKernels() as seen:
        model.hidden(embeddings_1TD, block_1T)
    if len(seen.kernels) == len(kinds):
        return dict(zip(kinds, seen.kernels, strict=True))
    return {"attention": seen.kernels[0]} if len(set(seen.kernels)) == 1 else {}
