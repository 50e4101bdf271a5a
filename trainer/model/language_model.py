"""The frozen language model: the embedding of tokens, the decoder up to its last hidden states, and the output head.

Logits are computed only where a label is predicted: of a whole sequence they would take gigabytes a sample.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cache_store.errors import ConfigError, ModelError
from trainer.model.model_config import TEXT_ALONE, AutoClass
from trainer.model.own_projector import ImageParts
from trainer.model.pretrained import first_line
from trainer.model.projector import CAUSAL

# Axes: N samples, T tokens, D model width, L label tokens, V vocabulary.


Masks = Tensor | dict[str, Tensor]
"""One mask [N, 1, Q, K] for all layers, or a dict with one for each layer type."""

VOCABULARY_CHUNK = 8_192
FINGERPRINT_VALUES = 4_096
"""At least this many values of each weight are hashed into the model's identity (all, if it has fewer)."""

NOT_IDENTITY = {"_name_or_path", "transformers_version", "dtype", "_attn_implementation"}
"""Fields of a config that do not change what a model computes."""


class LanguageModel(nn.Module):
    """A frozen causal decoder."""

    def __init__(self, embed: nn.Module, decoder: nn.Module, head: nn.Module, config: Any) -> None:
        super().__init__()
        self.embed, self.decoder, self.head = embed, decoder, head
        self.config = config.get_text_config(decoder=True)
        self.attention: SDPBackend | None = None
        """The only attention kernel that `hidden` may run; None: torch chooses."""
        self.logit_scale = logit_scale(self.config)
        self.soft_cap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.image_parts: ImageParts | None = None
        """A multimodal checkpoint's image parts; they do not count as a part of this language model."""
        self.opened_by: AutoClass = TEXT_ALONE
        """The class of transformers that opens the whole model."""
        self.weight_names = sorted(name for name, _ in self.named_parameters())
        """A weight that two parts share has one name, also after FSDP2 gives each part a copy."""
        self.requires_grad_(False)
        self.eval()

    @property
    def width(self) -> int:
        return int(self.embed.embedding_dim)  # type: ignore[arg-type]

    @property
    def num_embeddings(self) -> int:
        return int(self.embed.num_embeddings)  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.decoder.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    @property
    def rounding(self) -> float:
        return 1e-4 if self.dtype == torch.float32 else 3e-2

    @property
    def max_tokens(self) -> int | None:
        """Positions of the longest sequence; None if the config does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    def hidden(self, embeddings_NTD: Tensor, block_1T: Tensor | None = None) -> Tensor:
        """Compute the last hidden states [N, T, D]; tokens with the same block attend to each other (`image_masks`).

        Causality alone hides padding on the right.
        """
        masks = {} if block_1T is None else {"attention_mask": image_masks(self.config, block_1T, self.dtype)}
        with self.chosen_attention():
            hidden: Tensor = self.decoder(inputs_embeds=embeddings_NTD, use_cache=False, **masks).last_hidden_state
        return hidden

    def chosen_attention(self) -> AbstractContextManager[None]:
        return nullcontext() if self.attention is None else sdpa_kernel(self.attention)

    def logits(self, hidden_LD: Tensor) -> Tensor:
        logits_LV: Tensor = self.head(hidden_LD)
        if self.logit_scale != 1:
            logits_LV = logits_LV * self.logit_scale
        return logits_LV if self.soft_cap is None else torch.tanh(logits_LV / self.soft_cap) * self.soft_cap

    @torch.no_grad()
    def embedding_rms(self) -> float:
        tokens = torch.arange(self.config.vocab_size, device=self.device)
        squares = [self.embed(chunk).double().square().mean(1) for chunk in torch.split(tokens, VOCABULARY_CHUNK)]
        return float(torch.cat(squares).mean().sqrt())

    @torch.no_grad()
    def identity(self) -> str:
        """Hash the config and every weight's name, shape and some thousand values, whatever the run's precision.

        Ranks that share the model must call it together.
        """
        config = {key: value for key, value in self.config.to_dict().items() if key not in NOT_IDENTITY}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        for name in self.weight_names:
            weight: Tensor = self.get_parameter(name)
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()
            stride = max(1, weight.numel() // FINGERPRINT_VALUES)
            values = weight.flatten()[::stride].to(torch.bfloat16).cpu().contiguous()
            digest.update(f"{name} {tuple(weight.shape)}\n".encode())
            digest.update(values.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @contextmanager
    def whole_head(self) -> Iterator[None]:
        """Within the block, a head that ranks share is whole: each rank may use it as often as it needs."""
        if not isinstance(self.head, FSDPModule):
            yield
            return
        self.head.set_reshard_after_backward(False)
        self.head.unshard()
        try:
            yield
        finally:
            self.head.set_reshard_after_backward(True)
            self.head.reshard()

    def layers(self) -> list[nn.Module]:
        from transformers.modeling_layers import GradientCheckpointingLayer  # takes seconds to import

        return [module for module in self.decoder.modules() if isinstance(module, GradientCheckpointingLayer)]

    def checkpoint_layers(self, kind: Literal["selective", "full"] = "full") -> None:
        """Recompute each layer in the backward pass: all of it, or only cheap operations (`selective`).

        transformers' own switch acts only in training mode, which would also turn on dropout.
        """
        if not (layers := self.layers()):
            raise ModelError("this language model has no layers to recompute; set run.gradient_checkpointing: none")

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if kind == "full":
                return nullcontext(), self.chosen_attention()
            keep = partial(checkpoint_policy, self.width)
            computed, again = create_selective_checkpoint_contexts(keep)  # type: ignore[no-untyped-call]
            return computed, enter_both(self.chosen_attention(), again)

        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is random
        if kind == "selective" or self.attention is not None:
            options["context_fn"] = contexts
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, **options)

    def compile_decoder(self, part: Literal["layers", "whole"] = "whole", backend: str = "inductor") -> None:
        """Compile the decoder, or each kind of layer once, at its first use; ConfigError without a compiler."""
        refuse_uncompilable(backend, self.device)
        layers = self.layers() if part == "layers" else []
        if layers:  # beyond torch's limit of 8, further sizes and lengths of text would run uncompiled
            torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_GRAPHS
        for layer in layers:
            layer.compile(backend=backend, dynamic=False)
        if not layers:
            self.decoder.compile(backend=backend)


def logit_scale(config: Any) -> float:
    """Return the factor that a model applies to its logits; the probe refuses a model with an unknown one."""
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
        if scale := getattr(config, name, None):
            return float(scale)
    scaling = float(getattr(config, "logits_scaling", 1.0))  # HyperCLOVA X multiplies by it
    return 1 / scaling if config.model_type.startswith("granite") else scaling


@contextmanager
def enter_both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


MOST_GRAPHS = 2**16
"""More than the sizes of a cache times the lengths that texts are padded to."""

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}

KEPT = {
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_attention_math.default,
}
"""Operations whose outputs selective checkpointing keeps, besides large products."""


def checkpoint_policy(width: int, _: Any, operation: Any, *inputs: Any, **__: Any) -> CheckpointPolicy:
    """Keep attention and large products; a product by less than width² weights is cheap to redo."""
    is_large = operation in PRODUCTS and inputs[-1].numel() >= width**2
    return CheckpointPolicy.MUST_SAVE if is_large or operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def refuse_uncompilable(backend: str, device: torch.device) -> None:
    """Raise ConfigError, before the first step, if torch.compile finds no compiler; precompute says the same."""
    from torch._dynamo.exc import TorchDynamoException  # torch.compile raises it, whichever part fails

    try:
        torch.compile(torch.square, backend=backend)(torch.ones(1, device=device))
    except TorchDynamoException as error:
        needed = "a C++ compiler (g++, or the one that CXX names)" if device.type == "cpu" else "Triton"
        raise ConfigError(
            f"run.compile: torch.compile does not work here ({first_line(error)}); "
            f"install {needed}, or set run.compile: none"
        ) from error


# Axes: N samples, T positions; Q of them as queries, K as keys.


def image_masks(config: Any, block_NT: Tensor, dtype: torch.dtype, is_padding_NT: Tensor | None = None) -> Masks:
    """Make causal masks under which tokens with the same `block` also attend to each other, unless it is CAUSAL.

    Sliding windows and chunks limit how far a token attends. Padding is seen by itself alone: no row may be empty.
    """
    place_T = torch.arange(block_NT.shape[1], device=block_NT.device)
    same_NQK = (block_NT[:, :, None] == block_NT[:, None]) & (block_NT[:, :, None] != CAUSAL)
    seen_NQK = (place_T <= place_T[:, None]) | same_NQK
    if is_padding_NT is not None:
        seen_NQK = (seen_NQK & ~is_padding_NT[:, None]) | torch.eye(
            len(place_T), dtype=torch.bool, device=place_T.device
        )
    near_NQK, chunk_NQK = seen_NQK, seen_NQK
    if (window := getattr(config, "sliding_window", None)) is not None:
        near_NQK = seen_NQK & (place_T > place_T[:, None] - window)
    if (size := getattr(config, "attention_chunk_size", None)) is not None:
        padding_N1 = 0 if is_padding_NT is None else is_padding_NT.sum(1, keepdim=True)
        chunk_NT = (place_T[None] - padding_N1) // size  # padding stands before a text
        chunk_NQK = seen_NQK & (chunk_NT[:, :, None] == chunk_NT[:, None])
    bounded = {"sliding_attention": near_NQK, "chunked_attention": chunk_NQK}
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return to_attention_mask(config, near_NQK[:, None], dtype)
    return {kind: to_attention_mask(config, bounded.get(kind, seen_NQK)[:, None], dtype) for kind in set(kinds)}


def to_attention_mask(config: Any, seen_N1QK: Tensor, dtype: torch.dtype) -> Tensor:
    if config._attn_implementation == "eager":
        return torch.zeros_like(seen_N1QK, dtype=dtype).masked_fill(~seen_N1QK, torch.finfo(dtype).min)
    return seen_N1QK
