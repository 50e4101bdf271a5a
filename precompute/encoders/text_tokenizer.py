"""The texts of a text encoder: cleaned, put into a template, and tokenized."""

import hashlib
import html
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

import ftfy
from transformers import AutoTokenizer

from cache_store.errors import ConfigError, ModelError
from cache_store.format.array import PLAIN_TEMPLATE, TextRecipe
from precompute.encoders.encoder import TextInputs, TextLocation, Tokens
from precompute.encoders.encoder_config import Clean, EncoderConfig, Padding
from precompute.encoders.model_files import ModelFiles, model_file
from precompute.encoders.weights import json_line, model_errors, silence_transformers

FILES = (
    *("added_tokens.json", "merges.txt", "special_tokens_map.json", "spiece.model", "tokenizer.json"),
    *("tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
)


def prompt_clean(text: str) -> str:
    """Clean a text as diffusers' pipelines of Wan and Kandinsky 5 do."""
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


class TemplateTokenizer(TextInputs):
    """Cleans texts, puts them into a template and makes tokens of them, for several threads."""

    def __init__(self, files: ModelFiles, held: TextLocation, config: EncoderConfig) -> None:
        assert config.max_tokens is not None
        self._tokenizer, self.sha256 = load_tokenizer(files)
        self.pad: int | None = self._tokenizer.pad_token_id
        clean: Clean = held.clean if config.clean == "auto" else config.clean
        padding: Padding = held.padding if config.padding == "auto" else config.padding
        self._clean, self._template = CLEAN[clean], config.template
        self._lock = threading.Lock()
        """Held during calls: a tokenizer keeps the option to cut from one call to the next."""
        blank, before = self._ids([self._within(""), self._template.partition(PLAIN_TEMPLATE)[0]], cut=False)
        self._keeps_first = config.drop == "instruction"
        self._drop = max(0, len(before) - 2) if config.drop == "instruction" else config.drop
        self.most = self._drop + config.max_tokens
        """Most tokens of a text that are encoded, with those that are dropped afterwards."""
        if len(blank) < self._drop:
            raise ConfigError(f"encoder.drop is {self._drop}, but encoder.template is {len(blank)} tokens alone")
        if len(blank) >= self.most:
            raise ConfigError(
                f"encoder.max_tokens must be at least {len(blank) - self._drop + 1}, got {config.max_tokens}: the "
                "template and the tokenizer's own tokens leave no room for a text"
            )
        if padding in SEEN and self.pad is None:
            raise ModelError(f"encoder.model {config.model}: its tokenizer has no padding; set encoder.padding: zero")
        if padding == "left" and self._drop:
            raise ConfigError(
                f"encoder.drop is for padding after the text, but encoder.padding is left for {files.class_name}; "
                "leave one of them out"
            )
        is_bare = held.null_is_bare and (self._keeps_first or not self._drop)
        null_prompt = "" if is_bare else self._within("")
        (null,) = self._tokens([null_prompt])
        self.null_ids = null.ids
        self.recipe = TextRecipe(
            source="caption",
            clean=clean,
            template=config.template,
            max_tokens=config.max_tokens,
            drop=self._drop,
            keeps_first=self._keeps_first,
            padding=padding,
            null_prompt=null_prompt,
            null_tokens=null.whole,
        )

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        return self._tokens([self._within(self._clean(text)) for text in texts]) if texts else []

    def _tokens(self, whole: list[str]) -> list[Tokens]:
        with self._lock:
            found = self._ids(whole, cut=False)
            long = [place for place, ids in enumerate(found) if len(ids) > self.most]
            counts = [max(len(ids) - self._drop, int(self._keeps_first)) for ids in found]
            if long:  # cut by the tokenizer, which keeps the tokens that end a text
                cut = self._ids([whole[place] for place in long], cut=True)
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
    folder = re.sub("^text_encoder", "tokenizer", files.subfolder)  # tokenizer_2 for text_encoder_2
    found = [(name, model_file(files.model, str(PurePosixPath(folder, name)))) for name in FILES]
    held = [(name, path) for name, path in found if path is not None]
    if not held:
        where = f"{files.model}/{folder}" if folder else files.model
        raise ModelError(f"encoder.model {files.model} has no tokenizer: {where} holds none of its files")
    digest = hashlib.sha256()
    for name, path in held:
        digest.update(json_line({"name": name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}))
    with model_errors(files), silence_transformers():
        return AutoTokenizer.from_pretrained(held[0][1].parent, trust_remote_code=False), digest.hexdigest()
