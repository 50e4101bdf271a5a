"""The frozen language model, in the parts that training needs.

Only three parts of it are used: the embedding of tokens, the decoder up to its last hidden states, and the output
head. So logits are made where a label is predicted and nowhere else: at a vocabulary of 262 k, full-sequence logits
would cost gigabytes a sample.
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
from trainer.model.attention import image_masks
from trainer.model.config import TEXT_ALONE, AutoClass
from trainer.model.own_projector import ImageParts
from trainer.model.pretrained import first_line

# Axes: N samples, T tokens, D model width, L label tokens, V vocabulary.


VOCABULARY_CHUNK = 8_192
FINGERPRINT_VALUES = 4_096
"""Values of each weight that enter the model's identity."""

NOT_IDENTITY = {"_name_or_path", "transformers_version", "dtype", "_attn_implementation"}
"""Parts of a config that say where and how a model was saved or loaded, not what it computes."""


class LanguageModel(nn.Module):
    """A frozen causal decoder that takes embeddings and gives logits where asked."""

    def __init__(self, embed: nn.Module, decoder: nn.Module, head: nn.Module, config: Any) -> None:
        super().__init__()
        self.embed, self.decoder, self.head = embed, decoder, head
        self.config = config.get_text_config(decoder=True)
        self.attention: SDPBackend | None = None
        """The only kernel that `hidden` may run; None: torch chooses."""
        self.logit_scale = 1.0
        self.soft_cap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.image_parts: ImageParts | None = None
        """What a multimodal checkpoint has for images; no part of what the language model is."""
        self.opened_by: AutoClass = TEXT_ALONE
        """The class of transformers that opens the whole model."""
        self.weight_names = sorted(name for name, _ in self.named_parameters())
        """A weight that two parts share has one name, also when ranks share the model and each part has its own."""
        self.requires_grad_(False)
        self.eval()

    @property
    def width(self) -> int:
        """Width of what enters the decoder; some models project it to another one inside."""
        return int(self.embed.embedding_dim)  # type: ignore[arg-type]

    @property
    def num_embeddings(self) -> int:
        """Tokens that it embeds."""
        return int(self.embed.num_embeddings)  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.decoder.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    @property
    def rounding(self) -> float:
        """Difference that two computations of one thing may have, relative to the largest value."""
        return 1e-4 if self.dtype == torch.float32 else 3e-2

    @property
    def max_tokens(self) -> int | None:
        """The longest sequence it knows positions for, where its config says."""
        return getattr(self.config, "max_position_embeddings", None)

    def hidden(self, embeddings_NTD: Tensor, block_1T: Tensor | None = None) -> Tensor:
        """Compute the last hidden states [N, T, D]; padding on the right is hidden by causality alone.

        Tokens of equal `block` see each other too, as `image_masks` says; it is the same of every sample.
        """
        masks = {} if block_1T is None else {"attention_mask": image_masks(self.config, block_1T, self.dtype)}
        with self.chosen_attention():
            hidden: Tensor = self.decoder(inputs_embeds=embeddings_NTD, use_cache=False, **masks).last_hidden_state
        return hidden

    def chosen_attention(self) -> AbstractContextManager[None]:
        """Let torch run this attention kernel alone in the block; any of them where none was chosen."""
        return nullcontext() if self.attention is None else sdpa_kernel(self.attention)

    def logits(self, hidden_LD: Tensor) -> Tensor:
        logits_LV: Tensor = self.head(hidden_LD)
        if self.logit_scale != 1:
            logits_LV = logits_LV * self.logit_scale
        return logits_LV if self.soft_cap is None else torch.tanh(logits_LV / self.soft_cap) * self.soft_cap

    @torch.no_grad()
    def embedding_rms(self) -> float:
        """Measure the root mean square of the token embeddings as they enter the decoder, with Gemma's √D in it."""
        tokens = torch.arange(self.config.vocab_size, device=self.device)
        squares = [self.embed(chunk).double().square().mean(1) for chunk in torch.split(tokens, VOCABULARY_CHUNK)]
        return float(torch.cat(squares).mean().sqrt())

    @torch.no_grad()
    def identity(self) -> str:
        """Hash the config and, of every weight, its name, its shape and some thousand values spread over it.

        The values enter as bfloat16, so that the precision of a run does not change the identity. Ranks that share the
        model call it together.
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
        """Keep the head whole in the block, on ranks that share it: there each may use it as often as it needs."""
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
        from transformers.modeling_layers import GradientCheckpointingLayer  # seconds, as in trainer/model/load.py

        return [module for module in self.decoder.modules() if isinstance(module, GradientCheckpointingLayer)]

    def checkpoint_layers(self, kind: Literal["selective", "full"] = "full") -> None:
        """Recompute each layer in the backward pass, or of each what costs little.

        transformers' own switch acts only in training mode, which would also turn on the model's dropout. Without
        dropout nothing is random, so no generator's state is kept. What is computed again runs the chosen attention.
        """
        if not (layers := self.layers()):
            raise ModelError("this language model has no layers to recompute; set run.gradient_checkpointing: none")

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if kind == "full":
                return nullcontext(), self.chosen_attention()
            keep = partial(is_kept, self.width)
            computed, again = create_selective_checkpoint_contexts(keep)  # type: ignore[no-untyped-call]
            return computed, in_both(self.chosen_attention(), again)

        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if kind == "selective" or self.attention is not None:
            options["context_fn"] = contexts
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, **options)

    def compile_decoder(self, part: Literal["layers", "whole"] = "whole", backend: str = "inductor") -> None:
        """Have it compiled at the first use, or each layer by itself; ConfigError without a compiler.

        Layers share their code, so one of a kind is compiled for all. A model without known layers is compiled whole.
        """
        refuse_uncompilable(backend, self.device)
        layers = self.layers() if part == "layers" else []
        for layer in layers:
            layer.compile(backend=backend, dynamic=False)
        if not layers:
            self.decoder.compile(backend=backend)


@contextmanager
def in_both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}

KEPT = {
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_attention_math.default,
}
"""Operations whose outputs selective checkpointing keeps beside large products: nearly all of a layer's work."""


def is_kept(width: int, _: object, operation: Any, *inputs: Any, **__: Any) -> CheckpointPolicy:
    """Keep attention and products; a product by less than a square matrix of the model's width is cheap to redo."""
    is_large = operation in PRODUCTS and inputs[-1].numel() >= width**2
    return CheckpointPolicy.MUST_SAVE if is_large or operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def refuse_uncompilable(backend: str, device: torch.device) -> None:
    """Raise ConfigError where torch.compile finds no compiler: before the first step, in precompute's words.

    Neither program imports the other, and cache_store, which both import, knows no torch; a test compares the words.
    """
    from torch._dynamo.exc import TorchDynamoException  # what torch.compile raises, whichever part of it fails

    try:
        torch.compile(torch.square, backend=backend)(torch.ones(1, device=device))
    except TorchDynamoException as error:
        needed = "a C++ compiler (g++, or the one that CXX names)" if device.type == "cpu" else "Triton"
        raise ConfigError(
            f"run.compile: torch.compile does not work here ({first_line(error)}); "
            f"install {needed}, or set run.compile: none"
        ) from error
