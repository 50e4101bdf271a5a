"""Find which attention kernel each kind of layer runs, by running it at a run's own length."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from cache_store.errors import ConfigError
from trainer.model.language_model import LanguageModel
from trainer.model.pretrained import first_line

# Axes: N samples, T tokens, D model width.


MATH = "math"
"""The kernel that keeps all of a sequence's attention weights in memory."""

FLASH, EFFICIENT, CUDNN = "flash", "memory-efficient", "cuDNN"

KERNELS = {
    "_scaled_dot_product_flash_attention_for_cpu": FLASH,
    "_scaled_dot_product_flash_attention": FLASH,
    "_scaled_dot_product_efficient_attention": EFFICIENT,
    "_scaled_dot_product_cudnn_attention": CUDNN,
    "_softmax": MATH,
    "_safe_softmax": MATH,
}
"""Kernels by the operation that shows them; only its softmax shows torch's math kernel."""

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
    """Name the kernel of each kind of layer, for one sequence of `tokens` tokens; empty if the layers are unknown.

    `block_1T` is as in `LanguageModel.hidden`. Gradients are on, as in training: a kernel may have no backward pass.
    Only the first layers run, until every kind has.
    """
    layers = model.layers()
    kinds = list(getattr(model.config, "layer_types", None) or ["attention"] * len(layers))[: len(layers)]
    if not kinds:
        return {}
    needed = max(kinds.index(kind) for kind in set(kinds)) + 1
    embeddings_1TD = torch.zeros(1, tokens, model.width, dtype=model.dtype, device=model.device, requires_grad=True)
    # The mode does not see into compiled layers, and layers that ran under it would not be compiled later.
    eager = torch.compiler.set_stance("force_eager")
    with eager, first_layers(model.decoder, needed) as is_cut, SeenKernels() as seen:
        model.hidden(embeddings_1TD, block_1T)
    if not is_cut or len(seen.kernels) != needed:
        return {"attention": kernel} if len(set(seen.kernels)) == 1 and (kernel := seen.kernels[0]) else {}
    return dict(reversed(list(zip(kinds, seen.kernels, strict=False))))


@contextmanager
def first_layers(decoder: nn.Module, count: int) -> Iterator[bool]:
    """Within the block, run only the decoder's first layers; yield False if it has no list named `layers`."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        yield False
        return
    decoder.layers = layers[:count]
    try:
        yield True
    finally:
        decoder.layers = layers
