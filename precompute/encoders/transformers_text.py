"""Text encoders as transformers runs them.

Only files with weights of the encoder are downloaded, and only those weights are read, from safetensors only. They are
hashed as saved and kept in the compute dtype: they may be 20 GB.
"""

from typing import Any

import torch
import transformers
from torch import Tensor

from cache_store.errors import ConfigError, ModelError
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.model_files import ModelFiles, TextLocation, refuse_incomplete
from precompute.encoders.text_encoder import TemplateTokenizer, TextModel, TransformersTextEncoder
from precompute.encoders.weights import (
    TRANSFORMERS_FILES,
    model_errors,
    read_weights,
    silence_transformers,
    weights_sha256,
)

NOT_OF_OUTPUT = frozenset(
    {"transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", "use_cache"}
)

"""Config values that no output depends on."""

TIED = "encoder.embed_tokens.weight"
"""The second name of T5's embeddings; a checkpoint may have either name, or both."""


def load_text_encoder(files: ModelFiles, held: TextLocation, config: EncoderConfig) -> TransformersTextEncoder:
    """Load the frozen text encoder of the checkpoint in `files`; raise ModelError if that fails."""
    with model_errors(files):
        model_config = config_of(files, held)
        weights = encoder_weights(files, held)
        class_name, keys = held.runs, held.config_keys or sorted(model_config.to_diff_dict().keys() - NOT_OF_OUTPUT)
        digest = weights_sha256(class_name, model_config.to_dict(), keys, weights.items())
        model = read_model(files, held, model_config, weights, config.torch_dtype)
    del weights
    tokenizer = TemplateTokenizer(files, held, config)
    refuse_too_many_tokens(model_config, tokenizer)
    layers = layers_of(files, model_config, config)
    return TransformersTextEncoder(
        TextModel(
            model=model.to(config.torch_device),
            class_name=class_name,
            weights_sha256=digest,
            layers=layers,
            pooled=pooled_output(model) if config.output == "pooled" else None,
            features=features_of(model_config, config, layers),
            padding=held.padding if config.padding == "auto" else config.padding,
        ),
        tokenizer,
        config,
    )


def config_of(files: ModelFiles, held: TextLocation) -> Any:
    """Return the encoder's part of the checkpoint's config; raise ModelError if that is of another class."""
    kind, wanted = files.config.get("model_type"), getattr(transformers, held.runs).config_class
    if kind not in transformers.CONFIG_MAPPING:
        raise ModelError(f"encoder.model {files.model} is of model type {kind}, which transformers does not know")
    whole = transformers.CONFIG_MAPPING[kind].from_dict(dict(files.config))
    found = whole if isinstance(whole, wanted) else whole.get_text_config()
    if not isinstance(found, wanted):
        raise ModelError(f"encoder.model {files.model} has a {type(found).__name__}, not that of a {held.runs}")
    return found


def encoder_weights(files: ModelFiles, held: TextLocation) -> dict[str, Tensor]:
    """Read each weight of the encoder in the checkpoint, by its name in the encoder."""
    named = read_weights(files, TRANSFORMERS_FILES, held.name_within)
    weights = {name: weight for name, weight in named if not name.endswith("position_ids")}  # saved by older versions
    if TIED in weights:
        weights.setdefault("shared.weight", weights.pop(TIED))
        weights.pop(TIED, None)
    return weights


def read_model(
    files: ModelFiles, held: TextLocation, config: Any, weights: dict[str, Tensor], dtype: torch.dtype
) -> Any:
    """Load the encoder, frozen."""
    with silence_transformers():
        model, report = getattr(transformers, held.runs).from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # so that they are reported, and refused below
            output_loading_info=True,
        )
    refuse_incomplete(
        files, {kind: keys for kind, keys in report.items() if kind.endswith("_keys")}, "text encoder", ("",)
    )
    return model.requires_grad_(False).eval()


def refuse_too_many_tokens(model_config: Any, tokenizer: TemplateTokenizer) -> None:
    """Raise ConfigError if the model has too few positions for so many tokens."""
    most, drop = getattr(model_config, "max_position_embeddings", None), tokenizer.drop
    if most is not None and tokenizer.most > most:
        raise ConfigError(
            f"encoder.max_tokens must be at most {most - drop}: the model has positions for {most} tokens, and "
            f"{drop} are dropped; got {tokenizer.most - drop}"
        )


def layers_of(files: ModelFiles, model_config: Any, config: EncoderConfig) -> tuple[int, ...]:
    """Return the hidden states to keep; none for the last one, after any final norm."""
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


def pooled_output(model: Any) -> str:
    """Return the name of the output with one vector of a text; raise ConfigError if there is none."""
    name = type(model).__name__
    outputs = {"CLIPTextModelWithProjection": "text_embeds", "CLIPTextModel": "pooler_output"}
    if name not in outputs:
        raise ConfigError(f"encoder.output: a {name} has no pooled vector of a text; leave it out")
    return outputs[name]


def features_of(model_config: Any, config: EncoderConfig, layers: tuple[int, ...]) -> int:
    if config.output == "pooled" and "WithProjection" in (model_config.architectures or [""])[0]:
        return int(model_config.projection_dim)
    return int(model_config.hidden_size) * max(1, len(layers))
