"""Load a language model: all weights come from the checkpoint, and our logits equal those of its own forward pass."""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cache_store.errors import ConfigError, ModelError
from trainer.model.language_model import LanguageModel
from trainer.model.model_config import TEXT_ALONE, AutoClass
from trainer.model.own_projector import find_image_parts, find_own_projector
from trainer.model.pretrained import (
    UNREADABLE_MODEL,
    explain_unreadable,
    first_line,
    loading_bar_hidden,
    pretrained_name,
    refuse_unreachable,
)
from trainer.model.projector import CAUSAL

# Axes: N samples, T tokens, D model width, V vocabulary.


REFUSED_MASKS = (
    "model.language_model {!r} does not follow the masks of attention: full; set causal for each of model.towers"
)

LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
"""Config fields with a scale of the logits: Cohere, Falcon-H1 and HyperCLOVA X multiply by it, Granite divides."""

DECODER_ALONE = "name a causal decoder, such as a Gemma 3, Qwen3 or Llama"

UNQUANTISED = "quantised language models are not supported: name one in float32, float16 or bfloat16"

DRAWN_VALUES = 4_096
"""At least this many values of each matrix are looked at (all, if it has fewer)."""

CAUSAL_SETTINGS: dict[str, dict[str, Any]] = {"paligemma": {"use_bidirectional_attention": False}}
"""Values of a text model's config under which it is causal, by the model type of the whole.

PaliGemma's image and prompt attend to each other, and only generated text is causal; here text always is.
"""

Transformers = Any
"""A model of transformers."""


def load_with_whole(name: str, dtype: torch.dtype, device: torch.device) -> tuple[LanguageModel, Transformers]:
    """Load a hub id or folder; return its frozen text model, and the whole model around it, which can generate.

    A multimodal checkpoint's vision tower is not read, and its own projector is taken out of the whole model.
    """
    with name_model(name) as path:
        full = load_every_weight(path, dtype).to(device)
        model = take_language_model(full, image_parts_of=full)
        check_forward(model, full)
        keep_only(model, full)
    return model, full


@contextmanager
def name_model(name: str) -> Iterator[str]:
    """Yield the hub id or folder for transformers to load; put the model's name before ModelErrors of the block."""
    path = pretrained_name(name)
    try:
        yield path
    except ModelError as error:
        raise ModelError(f"model.language_model {name!r} {error}") from None


def refuse_no_language_model(name: str) -> None:
    """Raise ModelError if the config of a hub id or folder is of no model that can be used; no weight is read."""
    with name_model(name) as path:
        refuse_unreachable(path)
        loader_of(read_causal_config(path))


def take_language_model(full: Transformers, image_parts_of: Transformers) -> LanguageModel:
    """Take the parts that training needs from `full`, and the image parts from the model that has their weights."""
    embed, decoder, head = text_modules(full)
    model = LanguageModel(embed, decoder, head, full.config)
    model.opened_by = opening_class(full.config)
    model.image_parts = find_image_parts(image_parts_of)
    return model


def unreadable_model(error: Exception) -> ModelError:
    return ModelError(f"cannot be loaded: {explain_unreadable(error)}")


def load_every_weight(path: str, dtype: torch.dtype, device: torch.device | None = None) -> Transformers:
    """Load transformers' model; ModelError for weights that the checkpoint lacks: transformers makes them random.

    On the device `meta` the model has shapes and no values.
    """
    config = read_causal_config(path)
    try:
        with loading_bar_hidden():
            full, report = loader_of(config).from_pretrained(
                path, config=config, dtype=dtype, output_loading_info=True, use_safetensors=True, device_map=device
            )
    except UNREADABLE_MODEL as error:
        raise unreadable_model(error) from None
    if missing := sorted(report["missing_keys"]):  # for a weight of another shape, transformers itself raises an error
        named = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ModelError(
            f"lacks {len(missing)} of its weights ({named}); they would be random. The checkpoint is incomplete or of "
            "another architecture than its config.json says"
        )
    refuse_whole_numbers(full)
    return full


def read_causal_config(path: str) -> Any:
    """Read a model's config, with values under which its text model is causal; ModelError if it is quantised."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except UNREADABLE_MODEL as error:
        raise unreadable_model(error) from None
    if getattr(config, "quantization_config", None):
        raise ModelError(f"is quantised (quantization_config in its config.json); {UNQUANTISED}")
    for name, value in CAUSAL_SETTINGS.get(config.model_type, {}).items():
        setattr(config.get_text_config(decoder=True), name, value)
    return config


def refuse_whole_numbers(full: Transformers) -> None:
    """Raise ModelError for matrices of integers: transformers casts int8 weights to floats, without their scales."""
    faulty = [name for name, weight in full.named_parameters() if weight.ndim > 1 and holds_integers(weight)]
    if faulty:
        raise ModelError(f"has integers in {len(faulty)} of its weights ({faulty[0]}): it is quantised; {UNQUANTISED}")


def holds_integers(weight: Tensor) -> bool:
    """Return whether a draw of its values are all integers, and not only -1, 0 and 1."""
    if weight.is_meta:
        return False
    drawn = weight.detach().flatten()[:: max(1, weight.numel() // DRAWN_VALUES)]
    return bool((drawn == drawn.round()).all() and (drawn.abs() > 1).any())


def loader_of(config: Any) -> Any:
    """Find transformers' class that loads only the language model of a config; ModelError if there is none."""
    from transformers import (  # takes seconds to import, and reading a projector does not need it
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
        AutoModelForCausalLM,
    )

    kind = type(config)
    if config.is_encoder_decoder:
        raise ModelError(f"is an encoder-decoder ({config.model_type}); {DECODER_ALONE}")
    if kind in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise ModelError(f"is an encoder ({config.model_type}), whose tokens attend to later ones; {DECODER_ALONE}")
    if is_multimodal(config) and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return text_part_of(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind])
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        other = f"is no language model ({config.model_type}); {DECODER_ALONE}"
        raise ModelError(multimodal_remedy(config) if is_multimodal(config) else other)
    return AutoModelForCausalLM


def opening_class(config: Any) -> AutoClass:
    """Return the name of transformers' class that opens the whole model of a config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return TEXT_ALONE if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else "AutoModelForImageTextToText"


def is_multimodal(config: Any) -> bool:
    return config.get_text_config(decoder=True) is not config


def text_part_of(whole_class: Any) -> Any:
    """Make a subclass of `whole_class` without its vision tower, whose weights are then neither read nor made.

    It keeps the name: by it transformers maps the weights' names in older checkpoints.
    """

    def build(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        whole_class.__init__(self, config, *arguments, **options)
        dropped = drop_other_parts(self, [*text_modules(self), *filter(None, [find_own_projector(self)])])
        self._keys_to_ignore_on_load_unexpected |= {rf"^{re.escape(name)}\." for name in dropped}

    return type(whole_class.__name__, (whole_class,), {"__init__": build, "__module__": whole_class.__module__})


def text_modules(whole: Any) -> Iterator[nn.Module]:
    """Yield embeddings, decoder and head; ModelError if there is no head.

    Llama 4's `get_decoder` finds no decoder and returns the model with its head.
    """
    if (head := whole.get_output_embeddings()) is None:
        raise ModelError("has no output embeddings, so it is no language model")
    decoder = whole.get_decoder()
    yield from (whole.get_input_embeddings(), decoder.model if hasattr(decoder, "lm_head") else decoder, head)


def drop_other_parts(whole: nn.Module, kept: Iterable[nn.Module]) -> list[str]:
    """Remove from `whole` every module whose weights no module in `kept` uses; return their names."""
    used = {id(weight) for module in kept for weight in module.parameters()}

    def drop_below(module: nn.Module, path: str) -> Iterator[str]:
        for name, child in list(module.named_children()):
            weights = {id(weight) for weight in child.parameters()}
            if weights and not weights & used:
                setattr(module, name, None)
                yield path + name
            else:
                yield from drop_below(child, f"{path}{name}.")

    return list(drop_below(whole, ""))


def keep_only(model: LanguageModel, full: Transformers) -> None:
    """Remove from `full` all that `model` does not use, even bare weights such as `image_newline` of LLaVA-NeXT.

    Those cannot go before the checkpoint is read: transformers initialises them.
    """
    drop_other_parts(full, [model])
    used = {id(weight) for weight in model.parameters()}
    for module in full.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) not in used:
                setattr(module, name, None)


def multimodal_remedy(config: Any) -> str:
    """Say which model to name instead of a multimodal checkpoint; some configs name the origin of their text model."""
    text = config.get_text_config(decoder=True)
    made_from = getattr(text, "_name_or_path", "") or "for example the one that it was made from"
    return (
        f"is multimodal ({config.model_type}), and its text model ({text.model_type}) cannot be used by itself here; "
        f"name a text-only model that AutoModelForCausalLM loads ({made_from}), or another multimodal one, such as a "
        "Gemma 3, Qwen2.5-VL, Qwen3-VL, LLaVA, PaliGemma or Llama 4"
    )


@torch.no_grad()
def check_forward(model: LanguageModel, full: Transformers) -> None:
    """Run the model on a few tokens as training will; ModelError unless it is causal and its own logits result."""
    generator = torch.Generator().manual_seed(0)
    tokens_NT = torch.randint(model.config.vocab_size, (2, 8), generator=generator).to(model.device)
    try:
        # First, so that a sharded model is known as one whole before its parts run.
        expected_NTV = full(input_ids=tokens_NT, use_cache=False).logits.float()
        embeddings_NTD = model.embed(tokens_NT)
        hidden_NTD = model.hidden(embeddings_NTD)
        find_logit_scale(model, hidden_NTD, expected_NTV)
        refuse_not_causal(model, embeddings_NTD, hidden_NTD)
    except UNREADABLE_MODEL as error:
        reason = f"fails when it runs on embeddings, as training runs it: {first_line(error)}"
        raise ModelError(multimodal_remedy(full.config) if is_multimodal(full.config) else reason) from None


def find_logit_scale(model: LanguageModel, hidden_NTD: Tensor, expected_NTV: Tensor) -> None:
    """Set the scale with which our logits equal the model's own; ModelError if there is none.

    This finds transformations that we do not know of. Scales come from the config, so they are exact at any precision.
    """

    def difference(scale: float) -> float:
        model.logit_scale = scale
        return float((model.logits(hidden_NTD).float() - expected_NTV).abs().max())

    least = difference(min(possible_logit_scales(model.config), key=difference))
    if math.isnan(least):
        raise ModelError("gives logits that are not finite: its weights, or the dtype that they are run in, are wrong")
    if not least <= model.rounding * float(expected_NTV.abs().max()):
        raise ModelError(
            "transforms its embeddings or logits in a way the trainer does not know: its own logits differ from ours "
            f"by {least:.3g}"
        )


def possible_logit_scales(config: Any) -> list[float]:
    """List the factors that a model may apply to its logits: 1, and each scale in its config and its inverse."""
    numbers = [getattr(config, name, None) for name in LOGIT_SCALES]
    scales = [float(number) for number in numbers if isinstance(number, int | float) and number != 0]
    return [1.0, *scales, *(1 / scale for scale in scales)]


def refuse_not_causal(model: LanguageModel, embeddings_NTD: Tensor, hidden_NTD: Tensor) -> None:
    """Raise ModelError if a token attends to later ones: it could copy the labels instead of predicting them."""
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
    """Raise ConfigError if the model does not follow masks under which an image's tokens attend to each other."""
    generator = torch.Generator().manual_seed(0)
    block_1T = torch.tensor([[CAUSAL, 0, 0, 0, CAUSAL, CAUSAL, CAUSAL, CAUSAL]], device=model.device)
    drawn_1TD = torch.randn(1, block_1T.shape[1], model.width, generator=generator)
    embeddings_1TD = drawn_1TD.to(model.device, model.dtype)
    changed_1TD = embeddings_1TD.clone()
    changed_1TD[:, 3] = -changed_1TD[:, 3]
    try:
        change_1TD = model.hidden(changed_1TD, block_1T) - model.hidden(embeddings_1TD, block_1T)
    except UNREADABLE_MODEL as error:
        raise ConfigError(f"{REFUSED_MASKS.format(name)}: {first_line(error)}") from None
    before, *image = change_1TD.abs().amax((0, 2))[:3].tolist()
    if not before < min(image):
        raise ConfigError(REFUSED_MASKS.format(name))
