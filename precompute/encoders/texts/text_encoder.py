"""The encoder that a frozen text model is: hidden states of its tokens, or one pooled vector."""

# Axes: N texts, T tokens, F features.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cache_store.errors import ModelError
from cache_store.format.schema import SampleLayout, TextRecipe
from precompute.encoders.config import EncoderConfig, Padding
from precompute.encoders.encoder import NO_TOKEN, Tokens
from precompute.encoders.identity import native_identity
from precompute.encoders.texts.tokenizer import TemplateTokenizer


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A text model on its device, in its compute dtype, and what a cache must know of it."""

    model: Any
    class_name: str
    weights_sha256: str
    layers: tuple[int, ...]
    """Hidden states taken and joined, as transformers counts them; none for the last one, behind any final norm."""
    pooled: str | None
    """The output that is one vector of a text, where that is taken."""
    features: int
    padding: Padding


class TransformersTextEncoder:
    """Maps tokens of texts to samples, on one device."""

    def __init__(self, model: TextModel, tokenizer: TemplateTokenizer, config: EncoderConfig) -> None:
        assert config.max_tokens is not None
        if model.padding == "seen" and tokenizer.pad is None:
            raise ModelError(f"encoder.model {config.model}: its tokenizer has no padding; set encoder.padding: zero")
        self.device = config.torch_device
        self.identity = native_identity(
            config,
            class_name=model.class_name,
            weights_sha256=model.weights_sha256,
            layer=model.layers[0] if len(model.layers) == 1 else None,
            layers=model.layers if len(model.layers) > 1 else (),
            pooled=model.pooled is not None,
            tokenizer_sha256=tokenizer.sha256,
        )
        self.recipe = TextRecipe(
            source="caption",
            template=config.template,
            max_tokens=config.max_tokens,
            drop=config.drop,
            padding=model.padding,
        )
        self._model, self._tokenizer, self._pad = model, tokenizer, tokenizer.pad or 0

    def layout(self, height: int, width: int) -> SampleLayout:
        """[T, F], or [F] of a pooled vector, with statistics of each feature, whatever the size of an image."""
        axes: dict[str, int] = {"feature": self._model.features}
        if self._model.pooled is None:
            axes = {"token": self.recipe.max_tokens, **axes}
        return SampleLayout(axes=tuple(axes), shape=tuple(axes.values()), feature_axis="feature", has_preview=False)

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """Put texts into the template and make tokens of them; from any thread."""
        return self._tokenizer(texts)

    @torch.inference_mode()
    def encode(self, ids_NT: Tensor) -> Tensor:
        """Map tokens, int32 on any device, padded with `NO_TOKEN`, to samples in float32, on the encoder's device.

        Where there is no token at all, the first is padding that is attended to: nothing may attend to nothing.
        """
        model, ids_NT = self._model, ids_NT.to(self.device, non_blocking=True).long()
        is_token_NT = ids_NT != NO_TOKEN
        is_token_NT[:, 0] = True
        ids_NT = torch.where(ids_NT == NO_TOKEN, self._pad, ids_NT)
        made = model.model(
            input_ids=ids_NT,
            attention_mask=None if model.padding == "seen" else is_token_NT.long(),
            output_hidden_states=bool(model.layers),
        )
        if model.pooled is not None:
            pooled_NF: Tensor = getattr(made, model.pooled)
            return pooled_NF.float()
        states = [made.hidden_states[layer] for layer in model.layers] or [made.last_hidden_state]
        drop = self.recipe.drop
        hidden_NTF = torch.cat([state[:, drop:] for state in states], -1).float()
        return hidden_NTF.where(is_token_NT[:, drop:, None], 0.0) if model.padding == "zero" else hidden_NTF
