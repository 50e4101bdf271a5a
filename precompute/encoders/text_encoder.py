"""Frozen text encoders as transformers runs them: hidden states of a text's tokens, or one pooled vector.

Only the encoder's weights are read, and files without any are not downloaded. They are hashed as saved and kept in the
compute dtype: they may be 20 GB.
"""

from typing import Any

import torch
import transformers
from torch import Tensor

from cache_store.errors import ConfigError, ModelError
from cache_store.format.array import SampleLayout, Size
from precompute.encoders.encoder import NO_TOKEN, Encoder, TextLocation, layout_of_tokens
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.text_tokenizer import SEEN, ZEROS, TemplateTokenizer
from precompute.encoders.weights import (
    NOT_OF_OUTPUT,
    TRANSFORMERS_FILES,
    model_errors,
    native_identity,
    read_model,
    read_weights,
    weights_sha256,
)

# Axes: N texts, T tokens, F features.

TIED = "encoder.embed_tokens.weight"
"""The second name of T5's embeddings; a checkpoint may have either name, or both."""


def padded_before(ids_NT: Tensor) -> Tensor:
    """Move the padding of each text, `NO_TOKEN` at its end, before it."""
    length = ids_NT.shape[1]
    counts_N1 = (ids_NT != NO_TOKEN).sum(1, keepdim=True)
    return ids_NT.gather(1, (torch.arange(length, device=ids_NT.device) + counts_N1) % length)


class TransformersTextEncoder(Encoder):
    texts: TemplateTokenizer

    def __init__(self, files: ModelFiles, held: TextLocation, config: EncoderConfig) -> None:
        self.device = config.torch_device
        with model_errors(files):
            model_config = config_of(files, held)
            weights = encoder_weights(files, held)
            keys = held.config_keys or sorted(model_config.to_diff_dict().keys() - NOT_OF_OUTPUT)
            digest = weights_sha256(held.runs, model_config.to_dict(), keys, weights.items())
            kind = getattr(transformers, held.runs)
            given = {"config": model_config, "state_dict": weights, "dtype": config.torch_dtype}
            model = read_model(files, kind, "text encoder", **given)
        del weights
        self.texts = TemplateTokenizer(files, held, config)
        refuse_too_many_tokens(model_config, self.texts)
        self._layers = layers = layers_of(files, model_config, config)
        """Hidden states to join, as transformers counts them; none for the last one, after any final norm."""
        self._pooled = pooled_output(held.runs) if config.output == "pooled" else None
        self._features = features_of(model_config, config, layers)
        self._model = model.to(self.device)
        self.identity = native_identity(
            config,
            class_name=held.runs,
            weights_sha256=digest,
            layer=layers[0] if len(layers) == 1 else None,
            layers=layers if len(layers) > 1 else (),
            pooled=self._pooled is not None,
            tokenizer_sha256=self.texts.sha256,
        )

    def array(self, size: Size) -> SampleLayout:
        if self._pooled is None:
            return layout_of_tokens(self.texts.recipe.max_tokens, self._features)
        return SampleLayout(axes=("feature",), shape=(self._features,), feature_axis="feature", has_preview=False)

    @torch.inference_mode()
    def encode(self, ids_NT: Tensor) -> Tensor:
        padding, ids_NT = self.texts.recipe.padding, ids_NT.to(self.device, non_blocking=True).long()
        if padding == "left":
            ids_NT = padded_before(ids_NT)
        is_token_NT = ids_NT != NO_TOKEN
        is_token_NT[:, -1 if padding == "left" else 0] = True  # attention needs at least one token
        ids_NT = torch.where(ids_NT == NO_TOKEN, self.texts.pad or 0, ids_NT)
        made = self._model(
            input_ids=ids_NT,
            attention_mask=None if padding in SEEN else is_token_NT.long(),
            output_hidden_states=bool(self._layers),
        )
        if self._pooled is not None:
            pooled_NF: Tensor = getattr(made, self._pooled)
            return pooled_NF.float()
        states = [made.hidden_states[layer] for layer in self._layers] or [made.last_hidden_state]
        hidden_NTF = torch.cat([self._without_dropped(state) for state in states], -1).float()
        is_token_NT = self._without_dropped(is_token_NT)
        return hidden_NTF.where(is_token_NT[:, :, None], 0.0) if padding in ZEROS else hidden_NTF

    def _without_dropped(self, values_NT: Tensor) -> Tensor:
        drop = self.texts.recipe.drop
        if self.texts.recipe.keeps_first:
            return torch.cat([values_NT[:, :1], values_NT[:, drop + 1 :]], 1)
        return values_NT[:, drop:]


def config_of(files: ModelFiles, held: TextLocation) -> Any:
    """Return the encoder's part of the checkpoint's config."""
    kind, wanted = files.config.get("model_type"), getattr(transformers, held.runs).config_class
    if kind not in transformers.CONFIG_MAPPING:
        raise ModelError(f"encoder.model {files.model} is of model type {kind}, which transformers does not know")
    whole = transformers.CONFIG_MAPPING[kind].from_dict(dict(files.config))
    found = whole if isinstance(whole, wanted) else whole.get_text_config()
    if not isinstance(found, wanted):
        raise ModelError(f"encoder.model {files.model} has a {type(found).__name__}, not that of a {held.runs}")
    return found


def encoder_weights(files: ModelFiles, held: TextLocation) -> dict[str, Tensor]:
    named = read_weights(files, TRANSFORMERS_FILES, held.name_within)
    weights = {name: weight for name, weight in named if not name.endswith("position_ids")}  # saved by older versions
    if TIED in weights:
        weights.setdefault("shared.weight", weights.pop(TIED))
        weights.pop(TIED, None)
    return weights


def refuse_too_many_tokens(model_config: Any, tokenizer: TemplateTokenizer) -> None:
    most, drop = getattr(model_config, "max_position_embeddings", None), tokenizer.recipe.drop
    if most is not None and tokenizer.most > most:
        raise ConfigError(
            f"encoder.max_tokens must be at most {most - drop}: the model has positions for {most} tokens, and "
            f"{drop} are dropped; got {tokenizer.most - drop}"
        )


def layers_of(files: ModelFiles, model_config: Any, config: EncoderConfig) -> tuple[int, ...]:
    layers = () if config.layer == "auto" else (config.layer,) if isinstance(config.layer, int) else tuple(config.layer)
    most: int = model_config.num_hidden_layers
    for layer in layers:
        if not -most - 1 <= layer <= most:
            raise ConfigError(
                f"encoder.layer is {layer}, but {files.model} has hidden states 0 to {most}, or -1 to {-most - 1}"
            )
    if layers and config.output == "pooled":
        raise ConfigError("encoder.layer is for encoder.output: tokens; the pooled vector comes from the last one")
    return layers


def pooled_output(name: str) -> str:
    outputs = {"CLIPTextModelWithProjection": "text_embeds", "CLIPTextModel": "pooler_output"}
    if name not in outputs:
        raise ConfigError(f"encoder.output: a {name} has no pooled vector of a text; leave it out")
    return outputs[name]


def features_of(model_config: Any, config: EncoderConfig, layers: tuple[int, ...]) -> int:
    if config.output == "pooled" and "WithProjection" in (model_config.architectures or [""])[0]:
        return int(model_config.projection_dim)
    return int(model_config.hidden_size) * max(1, len(layers))
