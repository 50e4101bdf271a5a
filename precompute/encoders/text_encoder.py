"""A frozen text model as an encoder: its tokenizer, and hidden states of its tokens or one pooled vector."""

import hashlib
import html
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import ftfy
import torch
from torch import Tensor
from transformers import AutoTokenizer

from cache_store.errors import ConfigError, ModelError
from cache_store.format.array import PLAIN_TEMPLATE, SampleLayout, Size, TextRecipe
from precompute.encoders.encoder import NO_TOKEN, Encoder, Tokens
from precompute.encoders.encoder_config import Clean, EncoderConfig, Padding
from precompute.encoders.model_files import ModelFiles, TextLocation, model_file
from precompute.encoders.weights import json_line, model_errors, native_identity, silence_transformers

FILES = (
    *("added_tokens.json", "merges.txt", "special_tokens_map.json", "spiece.model", "tokenizer.json"),
    *("tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
)
"""Files that a tokenizer may be saved in."""


def tokenizer_folder(files: ModelFiles) -> str:
    """Return the tokenizer's folder: tokenizer_2 for a pipeline's text_encoder_2, else the model's own."""
    return re.sub("^text_encoder", "tokenizer", files.subfolder)


def prompt_clean(text: str) -> str:
    """Clean a text as the function of this name in diffusers' pipelines of Wan and Kandinsky 5 does."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(ftfy.fix_text(text)))).strip()


SEEN: tuple[Padding, ...] = ("seen", "seen-zero")
"""Kinds of padding to which text tokens attend."""
ZEROS: tuple[Padding, ...] = ("zero", "seen-zero")
"""Kinds of padding that are stored as zeros."""

CLEAN: dict[Clean, Callable[[str], str]] = {
    "none": str,
    "prompt_clean": prompt_clean,
    "lower": lambda text: text.lower().strip(),
}
"""Functions that clean a text, by the value of `encoder.clean`."""


class TemplateTokenizer:
    """Cleans texts, puts them into a template and makes tokens of them; safe to share between threads."""

    def __init__(self, files: ModelFiles, held: TextLocation, config: EncoderConfig) -> None:
        """Load a tokenizer; ModelError if none is found, ConfigError if the config's template does not fit it."""
        assert config.max_tokens is not None
        self._tokenizer, self.sha256 = load_tokenizer(files)
        self.clean: Clean = held.clean if config.clean == "auto" else config.clean
        self._template = config.template
        self._lock = threading.Lock()
        """Held during calls, because a tokenizer keeps the option to cut from one call to the next."""
        blank, before = self._ids([self._within(""), self._template.partition(PLAIN_TEMPLATE)[0]], cut=False)
        self.keeps_first = config.drop == "instruction"
        self.drop = max(0, len(before) - 2) if config.drop == "instruction" else config.drop
        self.most = self.drop + config.max_tokens
        """Number of tokens of a text that are encoded, with those that are dropped afterwards."""
        if len(blank) < self.drop:
            raise ConfigError(f"encoder.drop is {self.drop}, but encoder.template is {len(blank)} tokens alone")
        if len(blank) >= self.most:
            raise ConfigError(
                f"encoder.max_tokens must be at least {len(blank) - self.drop + 1}, got {config.max_tokens}: the "
                "template and the tokenizer's own tokens leave no room for a text"
            )
        is_bare = held.null_is_bare and (self.keeps_first or not self.drop)
        self.null_prompt = "" if is_bare else self._within("")
        (self.null,) = self._tokens([self.null_prompt])

    @property
    def pad(self) -> int | None:
        """The token that pads texts; None if there is none."""
        token: int | None = self._tokenizer.pad_token_id
        return token

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        return self._tokens([self._within(CLEAN[self.clean](text)) for text in texts]) if texts else []

    def _tokens(self, whole: list[str]) -> list[Tokens]:
        """Tokenize texts that are in their template already."""
        with self._lock:
            found = self._ids(whole, cut=False)
            long = [place for place, ids in enumerate(found) if len(ids) > self.most]
            counts = [max(len(ids) - self.drop, int(self.keeps_first)) for ids in found]
            if long:  # cut by the tokenizer, which keeps the tokens that end a text
                cut = self._ids([whole[place] for place in long], cut=True)
                found = [*found]
                for place, ids in zip(long, cut, strict=True):
                    found[place] = ids
        return [Tokens(ids, count) for ids, count in zip(found, counts, strict=True)]

    def _within(self, text: str) -> str:
        return self._template.replace(PLAIN_TEMPLATE, text)

    def _ids(self, texts: list[str], *, cut: bool) -> list[list[int]]:
        how = {"truncation": True, "max_length": self.most} if cut else {"truncation": False}
        ids: list[list[int]] = self._tokenizer(texts, padding=False, verbose=False, **how)["input_ids"]
        return ids


def load_tokenizer(files: ModelFiles) -> tuple[Any, str]:
    """Load the tokenizer of the encoder in `files`, with the SHA-256 of its files; ModelError if none is found."""
    folder = tokenizer_folder(files)
    found = [(name, model_file(files.model, str(PurePosixPath(folder, name)))) for name in FILES]
    held = [(name, path) for name, path in found if path is not None]
    if not held:
        where = f"{files.model}/{folder}" if folder else files.model
        raise ModelError(f"encoder.model {files.model} has no tokenizer: {where} holds none of its files")
    with model_errors(files), silence_transformers():
        return AutoTokenizer.from_pretrained(held[0][1].parent, trust_remote_code=False), files_sha256(held)


def files_sha256(files: Sequence[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(json_line({"name": name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}))
    return digest.hexdigest()


# Axes: N texts, T tokens, F features.


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A text model on its device, in its compute dtype, and the facts that a cache records."""

    model: Any
    class_name: str
    weights_sha256: str
    layers: tuple[int, ...]
    """Hidden states to join, as transformers counts them; none for the last one, after any final norm."""
    pooled: str | None
    """The output with one vector of a text, if that is kept."""
    features: int
    padding: Padding


def padded_before(ids_NT: Tensor) -> Tensor:
    """Move the padding of each text, `NO_TOKEN` at its end, before it."""
    length = ids_NT.shape[1]
    counts_N1 = (ids_NT != NO_TOKEN).sum(1, keepdim=True)
    return ids_NT.gather(1, (torch.arange(length, device=ids_NT.device) + counts_N1) % length)


class TransformersTextEncoder(Encoder):
    """Maps tokens of texts to samples, on one device."""

    def __init__(self, model: TextModel, tokenizer: TemplateTokenizer, config: EncoderConfig) -> None:
        assert config.max_tokens is not None
        if model.padding in SEEN and tokenizer.pad is None:
            raise ModelError(f"encoder.model {config.model}: its tokenizer has no padding; set encoder.padding: zero")
        if model.padding == "left" and tokenizer.drop:
            raise ConfigError(
                f"encoder.drop is for padding after the text, but encoder.padding is left for {model.class_name}; "
                "leave one of them out"
            )
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
            clean=tokenizer.clean,
            template=config.template,
            max_tokens=config.max_tokens,
            drop=tokenizer.drop,
            keeps_first=tokenizer.keeps_first,
            padding=model.padding,
            null_prompt=tokenizer.null_prompt,
            null_tokens=tokenizer.null.whole,
        )
        self.null_ids: Sequence[int] = tokenizer.null.ids
        self.texts = self
        self._model, self._tokenizer, self._pad = model, tokenizer, tokenizer.pad or 0

    def array(self, size: Size) -> SampleLayout:
        """Describe a sample [T, F], or [F] for a pooled vector, with statistics per feature."""
        axes: dict[str, int] = {"feature": self._model.features}
        if self._model.pooled is None:
            axes = {"token": self.recipe.max_tokens, **axes}
        return SampleLayout(axes=tuple(axes), shape=tuple(axes.values()), feature_axis="feature", has_preview=False)

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """Put each text into the template and tokenize it; called from several threads."""
        return self._tokenizer(texts)

    @torch.inference_mode()
    def encode(self, ids_NT: Tensor) -> Tensor:
        """Map tokens, int32 on any device, padded with `NO_TOKEN`, to samples in float32, on the encoder's device.

        A text without tokens attends to one token of its padding, because attention needs at least one.
        """
        model, ids_NT = self._model, ids_NT.to(self.device, non_blocking=True).long()
        if model.padding == "left":
            ids_NT = padded_before(ids_NT)
        is_token_NT = ids_NT != NO_TOKEN
        is_token_NT[:, -1 if model.padding == "left" else 0] = True
        ids_NT = torch.where(ids_NT == NO_TOKEN, self._pad, ids_NT)
        made = model.model(
            input_ids=ids_NT,
            attention_mask=None if model.padding in SEEN else is_token_NT.long(),
            output_hidden_states=bool(model.layers),
        )
        if model.pooled is not None:
            pooled_NF: Tensor = getattr(made, model.pooled)
            return pooled_NF.float()
        states = [made.hidden_states[layer] for layer in model.layers] or [made.last_hidden_state]
        hidden_NTF = torch.cat([self._without_dropped(state) for state in states], -1).float()
        is_token_NT = self._without_dropped(is_token_NT)
        return hidden_NTF.where(is_token_NT[:, :, None], 0.0) if model.padding in ZEROS else hidden_NTF

    def _without_dropped(self, values_NT: Tensor) -> Tensor:
        """Leave out the dropped tokens of [N, T, …]."""
        drop = self.recipe.drop
        if self.recipe.keeps_first:
            return torch.cat([values_NT[:, :1], values_NT[:, drop + 1 :]], 1)
        return values_NT[:, drop:]
