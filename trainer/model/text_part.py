"""The text model of a multimodal checkpoint: its class in transformers, built and read without the other parts.

Any class of transformers' tables will do whose text model gives its own logits; `check_forward` compares them.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from cache_store.errors import ModelError
from trainer.model.config import TEXT_ALONE, AutoClass
from trainer.model.own_projector import find_own_projector

CAUSAL: dict[str, dict[str, Any]] = {"paligemma": {"use_bidirectional_attention": False}}
"""Values of a text model's config under which it is causal, by the model type of the whole.

PaliGemma's image and prompt see each other, and only what it generates is causal; here text always is.
"""


def causal_config(path: str) -> Any:
    """Read a hub id's or folder's config, with values under which its text model is causal."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    for name, value in CAUSAL.get(config.model_type, {}).items():
        setattr(config.get_text_config(decoder=True), name, value)
    return config


def loader_of(config: Any) -> Any:
    """Find the class in transformers that reads a config's language model, alone; ModelError where there is none."""
    from transformers import (  # it takes seconds, and a projector is read without it
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
    )

    kind = type(config)
    if is_multimodal(config) and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return text_part_of(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind])
    if is_multimodal(config) and kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(multimodal_remedy(config))
    return AutoModelForCausalLM


def opened_by(config: Any) -> AutoClass:
    """Say which class of transformers opens a model of this config, with its other parts or without."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return TEXT_ALONE if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else "AutoModelForImageTextToText"


def is_multimodal(config: Any) -> bool:
    return config.get_text_config(decoder=True) is not config


def text_part_of(whole_class: Any) -> Any:
    """Make a class that is `whole_class` without its vision tower, whose weights are so neither read nor made.

    It keeps the name, by which transformers knows how weights were called in older checkpoints.
    """

    def build(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        whole_class.__init__(self, config, *arguments, **options)
        dropped = drop_other_parts(self, [*text_modules(self), *filter(None, [find_own_projector(self)])])
        self._keys_to_ignore_on_load_unexpected |= {rf"^{re.escape(name)}\." for name in dropped}

    return type(whole_class.__name__, (whole_class,), {"__init__": build, "__module__": whole_class.__module__})


def text_modules(whole: Any) -> Iterator[nn.Module]:
    """Yield embeddings, decoder and head; ModelError where there is no head.

    Llama 4's `get_decoder` finds none and returns the model with its head.
    """
    if (head := whole.get_output_embeddings()) is None:
        raise ModelError("has no output embeddings, so it is no language model")
    decoder = whole.get_decoder()
    yield from (whole.get_input_embeddings(), decoder.model if hasattr(decoder, "lm_head") else decoder, head)


def drop_other_parts(whole: nn.Module, kept: Iterable[nn.Module]) -> list[str]:
    """Take every module out of `whole` whose weights none of `kept` uses; return their names."""
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


def multimodal_remedy(config: Any) -> str:
    """Say what to name in the place of a multimodal checkpoint; some know what their text model was made from."""
    text = config.get_text_config(decoder=True)
    made_from = getattr(text, "_name_or_path", "") or "for example the one that it was made from"
    return (
        f"is multimodal ({config.model_type}), and its text model ({text.model_type}) cannot be used by itself here; "
        f"name a text-only model that AutoModelForCausalLM loads ({made_from}), or another multimodal one, such as a "
        "Gemma 3, Qwen2.5-VL, Qwen3-VL, LLaVA, PaliGemma or Llama 4"
    )
