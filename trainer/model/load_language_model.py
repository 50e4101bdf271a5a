"""Load a language model: all weights come from the checkpoint, and our logits equal those of its own forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from cache_store.errors import ConfigError, ModelError
from trainer.model.language_model import LanguageModel
from trainer.model.own_projector import find_image_parts
from trainer.model.pretrained import (
    UNREADABLE_MODEL,
    explain_unreadable,
    first_line,
    pretrained_name,
    refuse_unreachable,
)
from trainer.model.projector import CAUSAL

# Axes: N samples, T tokens, D model width, V vocabulary.


DECODER_ALONE = "name a causal decoder, such as a Gemma 3, Qwen3 or Llama"

CAUSAL_SETTINGS: dict[str, dict[str, Any]] = {"paligemma": {"use_bidirectional_attention": False}}
"""Values of a text model's config under which it is causal, by the model type of the whole."""

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}

Transformers = Any
"""A model of transformers."""


def load_with_whole(name: str, dtype: torch.dtype, device: torch.device) -> tuple[LanguageModel, Transformers]:
    """Load a hub id or folder; return its frozen text model, and the model around it, without a vision tower."""
    with name_model(name) as path:
        full = load_every_weight(path, dtype)
        model = take_language_model(full, image_parts_of=full)
        full.to(device)
        check_forward(model, full)
    return model, full


@contextmanager
def name_model(name: str) -> Iterator[str]:
    """Yield what transformers loads; put the model's name before ModelErrors of the block."""
    path = pretrained_name(name)
    try:
        yield path
    except ModelError as error:
        raise ModelError(f"model.language_model {name!r} {error}") from None


def refuse_no_language_model(name: str) -> None:
    """Raise ModelError, by the config alone, if a hub id or folder is no model that can be used."""
    with name_model(name) as path:
        refuse_unreachable(path)
        loader_of(read_causal_config(path))


def take_language_model(full: Transformers, image_parts_of: Transformers) -> LanguageModel:
    """Leave in `full` only what training needs; take the image parts of the model that has their weights."""
    if (head := full.get_output_embeddings()) is None:
        raise ModelError("has no output embeddings, so it is no language model")
    decoder = full.get_decoder()
    decoder = decoder.model if hasattr(decoder, "lm_head") else decoder  # Llama 4's gives the model with its head
    model = LanguageModel(full.get_input_embeddings(), decoder, head, full.config)
    model.opened_by = loader_of(full.config).__name__
    model.image_parts = find_image_parts(image_parts_of)
    keep_only(model, full)
    return model


def load_every_weight(path: str, dtype: torch.dtype, device: torch.device | None = None) -> Transformers:
    """Load transformers' model; ModelError for weights that the checkpoint lacks, which would be random."""
    config = read_causal_config(path)
    try:
        full, report = loader_of(config).from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, use_safetensors=True, device_map=device
        )
    except UNREADABLE_MODEL as error:
        raise ModelError(f"cannot be loaded: {explain_unreadable(error)}") from None
    if missing := sorted(report["missing_keys"]):  # for a weight of another shape, transformers itself raises an error
        named = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ModelError(
            f"lacks {len(missing)} of its weights ({named}); they would be random. The checkpoint is incomplete or of "
            "another architecture than its config.json says"
        )
    return full


def read_causal_config(path: str) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except UNREADABLE_MODEL as error:
        raise ModelError(f"cannot be loaded: {explain_unreadable(error)}") from None
    if getattr(config, "quantization_config", None):
        raise ModelError(
            "is quantised (quantization_config in its config.json), which is not supported: name a model in float32, "
            "float16 or bfloat16"
        )
    for name, value in CAUSAL_SETTINGS.get(config.model_type, {}).items():
        setattr(config.get_text_config(decoder=True), name, value)
    return config


def loader_of(config: Any) -> Any:
    """Return transformers' class that opens the whole model; ModelError if it holds no causal decoder."""
    from transformers import (  # takes seconds to import, and reading a projector does not need it
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    kind = type(config)
    attends_to_later = kind in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if config.is_encoder_decoder or attends_to_later:
        raise ModelError(f"is an encoder, or has one ({config.model_type}); {DECODER_ALONE}")
    if is_multimodal(config) and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        other = f"is no language model ({config.model_type}); {DECODER_ALONE}"
        raise ModelError(multimodal_remedy(config) if is_multimodal(config) else other)
    return AutoModelForCausalLM


def is_multimodal(config: Any) -> bool:
    return config.get_text_config(decoder=True) is not config


def keep_only(model: LanguageModel, full: Transformers) -> None:
    used = {id(weight) for weight in model.parameters()}
    for module in list(full.modules()):
        for name, child in list(module.named_children()):
            weights = {id(weight) for weight in child.parameters()}
            if weights and not weights & used:
                setattr(module, name, None)
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) not in used:
                setattr(module, name, None)


def multimodal_remedy(config: Any) -> str:
    text = config.get_text_config(decoder=True)
    made_from = getattr(text, "_name_or_path", "") or "for example the one that it was made from"
    return (
        f"is multimodal ({config.model_type}), and its text model ({text.model_type}) cannot be used by itself here; "
        f"name a text-only model that AutoModelForCausalLM loads ({made_from}), or another multimodal one, such as a "
        "Gemma 3, Qwen2.5-VL, Qwen3-VL, LLaVA, PaliGemma or Llama 4"
    )


@torch.no_grad()
def check_forward(model: LanguageModel, full: Transformers) -> None:
    """Raise ModelError unless the model is causal and, run as in training, gives its own logits."""
    generator = torch.Generator().manual_seed(0)
    tokens_NT = torch.randint(model.config.vocab_size, (2, 8), generator=generator).to(model.device)
    try:
        # First, so that a sharded model is known as one whole before its parts run.
        expected_NTV = full(input_ids=tokens_NT, use_cache=False).logits.float()
        embeddings_NTD = model.embed(tokens_NT)
        hidden_NTD = model.hidden(embeddings_NTD)
        difference = float((model.logits(hidden_NTD).float() - expected_NTV).abs().max())
        if not difference <= model.rounding * float(expected_NTV.abs().max()):  # NaN is refused too
            raise ModelError(
                "transforms its embeddings or logits in a way the trainer does not know: its own logits differ from "
                f"ours by {difference:.3g}"
            )
        refuse_not_causal(model, embeddings_NTD, hidden_NTD)
    except UNREADABLE_MODEL as error:
        reason = f"fails when it runs on embeddings, as training runs it: {first_line(error)}"
        raise ModelError(multimodal_remedy(full.config) if is_multimodal(full.config) else reason) from None


def refuse_not_causal(model: LanguageModel, embeddings_NTD: Tensor, hidden_NTD: Tensor) -> None:
    early = embeddings_NTD.shape[1] // 2
    changed_NTD = torch.cat([embeddings_NTD[:, :early], -embeddings_NTD[:, early:]], 1)
    change_NTD = (model.hidden(changed_NTD) - hidden_NTD)[:, :early]
    if not change_NTD.abs().max() <= model.rounding * hidden_NTD.abs().max():
        raise ModelError(
            "is not causal: its tokens attend to later ones, and so to the answers that it has to predict; name a "
            "causal decoder"
        )


@torch.no_grad()
def refuse_no_image_masks(model: LanguageModel, name: str) -> None:
    """Raise ConfigError unless the model follows masks under which an image's tokens attend to each other."""
    generator = torch.Generator().manual_seed(0)
    block_1T = torch.tensor([[CAUSAL, 0, 0, 0, CAUSAL, CAUSAL, CAUSAL, CAUSAL]], device=model.device)
    drawn_1TD = torch.randn(1, block_1T.shape[1], model.width, generator=generator)
    embeddings_1TD = drawn_1TD.to(model.device, model.dtype)
    changed_1TD = embeddings_1TD.clone()
    changed_1TD[:, 3] = -changed_1TD[:, 3]
    before, image = 0.0, [0.0]
    with suppress(*UNREADABLE_MODEL):  # a model may fail under masks
        change_1TD = model.hidden(changed_1TD, block_1T) - model.hidden(embeddings_1TD, block_1T)
        before, *image = change_1TD.abs().amax((0, 2))[:3].tolist()
    if not before < min(image):
        raise ConfigError(
            f"model.language_model {name!r} does not follow the masks of attention: full; set causal for each of "
            "model.towers"
        )
