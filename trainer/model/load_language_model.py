"""Loading a language model: every weight from the checkpoint, and what it computes compared with its own forward."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cache_store.errors import ConfigError, ModelError
from trainer.model.attention import CAUSAL
from trainer.model.language_model import LanguageModel
from trainer.model.own_projector import find_image_parts
from trainer.model.pretrained import (
    UNREADABLE_MODEL,
    first_line,
    loading_bar_hidden,
    pretrained_name,
    why_unreadable,
)
from trainer.model.text_part import (
    causal_config,
    drop_other_parts,
    is_multimodal,
    loader_of,
    multimodal_remedy,
    opened_by,
    text_modules,
)

# Axes: N samples, T tokens, D model width, V vocabulary.


REFUSED_MASKS = "model.language_model {!r} takes no masks for attention: full; set causal for each of model.towers"

LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
"""Where configs keep a scale of the logits: Cohere, Falcon-H1 and HyperCLOVA X multiply by theirs, Granite divides."""


Transformers = Any
"""A model as transformers has it."""


def load_with_whole(name: str, dtype: torch.dtype, device: torch.device) -> tuple[LanguageModel, Transformers]:
    """Load the text model of a hub id or folder, frozen, and the model that it is a part of, which can generate.

    A multimodal checkpoint's vision tower is not read; its own projector, where it is known here, leaves `whole` too.
    """
    with name_model(name) as path:
        full = load_every_weight(path, dtype).to(device)
        model = take_language_model(full, image_parts_of=full)
        check_forward(model, full)
        drop_other_parts(full, [model])
    return model, full


@contextmanager
def name_model(name: str) -> Iterator[str]:
    """Give the hub id or folder for transformers to load; ModelErrors of the block are told with the model's name."""
    path = pretrained_name(name)
    try:
        yield path
    except ModelError as error:
        raise ModelError(f"model.language_model {name!r} {error}") from None


def take_language_model(full: Transformers, image_parts_of: Transformers) -> LanguageModel:
    """Take the parts that training needs; `image_parts_of` is the model that has their weights."""
    embed, decoder, head = text_modules(full)
    model = LanguageModel(embed, decoder, head, full.config)
    model.opened_by = opened_by(full.config)
    model.image_parts = find_image_parts(image_parts_of)
    return model


def load_every_weight(path: str, dtype: torch.dtype, device: torch.device | None = None) -> Transformers:
    """Load transformers' model; ModelError for weights that the checkpoint lacks: transformers makes them random.

    On the device `meta` it has shapes and no values.
    """
    try:
        with loading_bar_hidden():
            config = causal_config(path)
            full, report = loader_of(config).from_pretrained(
                path, config=config, dtype=dtype, output_loading_info=True, use_safetensors=True, device_map=device
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
def check_forward(model: LanguageModel, full: Transformers) -> None:
    """Run the model on a few tokens as training will, and compare it with its own forward and with causality."""
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
        reason = f"fails when it runs on embeddings, as it does here: {first_line(error)}"
        raise ModelError(multimodal_remedy(full.config) if is_multimodal(full.config) else reason) from None


def find_logit_scale(model: LanguageModel, hidden_NTD: Tensor, expected_NTV: Tensor) -> None:
    """Set the scale that makes our short way to logits the model's own; ModelError where none does.

    So that no unknown transformation is silently left out. The scale is the config's, exact at any precision.
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


@torch.no_grad()
def refuse_no_image_masks(model: LanguageModel, name: str) -> None:
    """Raise ConfigError where the model does not heed masks under which tokens of an image see each other."""
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
