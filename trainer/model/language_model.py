"""The frozen language model: loaded with every weight from the checkpoint, or not at all.

Only three parts of it are used: the embedding of tokens, the decoder up to its last hidden states, and the output
head. So logits are made where a label is predicted and nowhere else: at a vocabulary of 262 k, full-sequence logits
would cost gigabytes a sample.
"""
# Axes: N samples, T tokens, D model width, L label tokens, V vocabulary.

import hashlib
import json
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from cache_store.errors import ConfigError, ModelError
from trainer.model.pretrained import UNREADABLE_MODEL, first_line, loading_bar_hidden, pretrained_name, why_unreadable

VOCABULARY_CHUNK = 8_192
FINGERPRINT_VALUES = 4_096
"""Values of each weight that enter the model's identity."""

NOT_IDENTITY = {"_name_or_path", "transformers_version", "dtype", "_attn_implementation"}
"""Parts of a config that say where and how a model was saved or loaded, not what it computes."""

LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
"""Where configs keep a scale of the logits: Cohere, Falcon-H1 and HyperCLOVA X multiply by theirs, Granite divides."""


class LanguageModel(nn.Module):
    """A frozen causal decoder that takes embeddings and gives logits where asked."""

    def __init__(self, embed: nn.Module, decoder: nn.Module, head: nn.Module, config: Any) -> None:
        super().__init__()
        self.embed, self.decoder, self.head = embed, decoder, head
        self.config = config.get_text_config(decoder=True)
        self.logit_scale = 1.0
        self.soft_cap: float | None = getattr(self.config, "final_logit_softcapping", None)
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

    def hidden(self, embeddings_NTD: Tensor) -> Tensor:
        """Compute the last hidden states [N, T, D]; padding on the right is hidden by causality alone."""
        hidden: Tensor = self.decoder(inputs_embeds=embeddings_NTD, use_cache=False).last_hidden_state
        return hidden

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

        The values enter as bfloat16, so that the precision of a run does not change the identity.
        """
        config = {key: value for key, value in self.config.to_dict().items() if key not in NOT_IDENTITY}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        for name, weight in sorted(self.named_parameters()):
            stride = max(1, weight.numel() // FINGERPRINT_VALUES)
            values = weight.flatten()[::stride].to(torch.bfloat16).cpu().contiguous()
            digest.update(f"{name} {tuple(weight.shape)}\n".encode())
            digest.update(values.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def checkpoint_layers(self) -> None:
        """Recompute each layer in the backward pass.

        transformers' own switch acts only in training mode, which would also turn on the model's dropout.
        """
        layers = [module for module in self.decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise ModelError("this language model has no layers to recompute; set run.gradient_checkpointing: false")
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def compile_decoder(self, backend: str = "inductor") -> None:
        """Have it compiled at the first use, and once more when lengths vary; ConfigError without a compiler."""
        refuse_uncompilable(backend, self.device)
        self.decoder.compile(backend=backend)


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
            f"install {needed}, or set run.compile: false"
        ) from error


def load_language_model(name: str, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """Load the text model of a hub id or folder, frozen; a multimodal checkpoint's other parts are dropped."""
    model, _ = load_with_whole(name, dtype, device)
    return model


def load_with_whole(name: str, dtype: torch.dtype, device: torch.device) -> tuple[LanguageModel, Any]:
    """Load the text model, and transformers' model that it is a part of, which can generate.

    What a multimodal checkpoint holds besides, such as a vision tower, is dropped from both.
    """
    path = pretrained_name(name)
    try:
        full = load_every_weight(path, dtype).to(device)
        head = full.get_output_embeddings()
        if head is None:
            raise ModelError("has no output embeddings, so it is no language model")
        model = LanguageModel(full.get_input_embeddings(), full.get_decoder(), head, full.config)
        check_forward(model, full)
        drop_other_parts(full, model)
    except ModelError as error:
        raise ModelError(f"model.language_model {name!r} {error}") from None
    return model, full


def drop_other_parts(full: nn.Module, model: LanguageModel) -> None:
    """Take every module out of `full` whose weights the text model does not use."""
    used = {id(weight) for weight in model.parameters()}
    for module in list(full.modules()):
        for name, child in list(module.named_children()):
            weights = {id(weight) for weight in child.parameters()}
            if weights and not weights & used:
                setattr(module, name, None)


def load_every_weight(path: str, dtype: torch.dtype) -> Any:
    """Load transformers' model; ModelError for weights that the checkpoint lacks: transformers makes them random."""
    try:
        with loading_bar_hidden():
            full, report = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, output_loading_info=True, use_safetensors=True, trust_remote_code=False
            )
    except UNREADABLE_MODEL as error:
        raise ModelError(f"cannot be loaded: {why_unreadable(error)}") from None
    if missing := sorted(report["missing_keys"]):  # one of another shape is an error of transformers' own
        named = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ModelError(
            f"lacks {len(missing)} of its weights ({named}); they would be random. The checkpoint is incomplete or of "
            "another architecture than its config.json says"
        )
    return full


@torch.no_grad()
def check_forward(model: LanguageModel, full: Any) -> None:
    """Run the model on a few tokens as training will, and compare it with its own forward and with causality."""
    generator = torch.Generator().manual_seed(0)
    tokens_NT = torch.randint(model.config.vocab_size, (2, 8), generator=generator).to(model.device)
    try:
        embeddings_NTD = model.embed(tokens_NT)
        hidden_NTD = model.hidden(embeddings_NTD)
        find_logit_scale(model, hidden_NTD, full(input_ids=tokens_NT, use_cache=False).logits.float())
        refuse_not_causal(model, embeddings_NTD, hidden_NTD)
    except UNREADABLE_MODEL as error:
        raise ModelError(f"fails when it runs on embeddings, as it does here: {first_line(error)}") from None


def find_logit_scale(model: LanguageModel, hidden_NTD: Tensor, expected_NTV: Tensor) -> None:
    """Set the scale that makes our short way to logits the model's own; ModelError where none does.

    So that no unknown transformation is silently left out. The scale is the config's, exact at any precision.
    """

    def difference(scale: float) -> float:
        model.logit_scale = scale
        return float((model.logits(hidden_NTD).float() - expected_NTV).abs().max())

    least = difference(min(possible_logit_scales(model.config), key=difference))
    if not least <= model.rounding * float(expected_NTV.abs().max()):
        raise ModelError(
            "transforms its embeddings or logits in a way the trainer does not know: its own logits differ from ours "
            f"by {least:.3g}"
        )


def possible_logit_scales(config: Any) -> list[float]:
    """List what a model may multiply its logits by: nothing, or a number of its config or its inverse."""
    numbers = [getattr(config, name, None) for name in LOGIT_SCALES]
    scales = [float(number) for number in numbers if isinstance(number, int | float) and number != 0]
    return [1.0, *scales, *(1 / scale for scale in scales)]


def refuse_not_causal(model: LanguageModel, embeddings_NTD: Tensor, hidden_NTD: Tensor) -> None:
    """Raise ModelError where a token sees later ones: the labels stand there, to be copied, not predicted."""
    early = embeddings_NTD.shape[1] // 2
    changed_NTD = torch.cat([embeddings_NTD[:, :early], -embeddings_NTD[:, early:]], 1)
    change_NTD = (model.hidden(changed_NTD) - hidden_NTD)[:, :early]
    if not change_NTD.abs().max() <= model.rounding * hidden_NTD.abs().max():
        raise ModelError(
            "is not causal: its tokens see those after them, and with them the answers that it is to predict; name a "
            "causal decoder"
        )
