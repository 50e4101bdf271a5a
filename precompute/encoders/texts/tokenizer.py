"""A text encoder's tokenizer, as transformers reads it, and the template that texts are put into."""

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from transformers import AutoTokenizer

from cache_store.errors import ConfigError, ModelError
from cache_store.format.schema import PLAIN_TEMPLATE
from precompute.encoders.encoder import Tokens
from precompute.encoders.identity import json_line
from precompute.encoders.model_files import ModelFiles, model_file
from precompute.encoders.weight_files import loading, silence

FILES = (
    *("added_tokens.json", "merges.txt", "special_tokens_map.json", "spiece.model", "tokenizer.json"),
    *("tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
)
"""All that a tokenizer may be saved in."""


def tokenizer_folder(files: ModelFiles) -> str:
    """A pipeline's text_encoder_2 has its tokenizer in tokenizer_2; a model alone has it beside its weights."""
    begins = "text_encoder"
    return files.subfolder.replace(begins, "tokenizer", 1) if files.subfolder.startswith(begins) else files.subfolder


class TemplateTokenizer:
    """Makes tokens of texts within a template; safe to share between threads."""

    def __init__(self, files: ModelFiles, template: str, drop: int, most: int) -> None:
        """`most` tokens are kept, and `drop` of them left out later; ModelError where there is no tokenizer."""
        folder = tokenizer_folder(files)
        found = [(name, model_file(files.model, str(PurePosixPath(folder, name)))) for name in FILES]
        held = [(name, path) for name, path in found if path is not None]
        if not held:
            where = f"{files.model}/{folder}" if folder else files.model
            raise ModelError(f"encoder.model {files.model} has no tokenizer: {where} holds none of its files")
        self.sha256 = files_sha256(held)
        with loading(files), silence():
            self._tokenizer: Any = AutoTokenizer.from_pretrained(held[0][1].parent, trust_remote_code=False)
        self._template, self._drop, self._most = template, drop, most
        self._lock = threading.Lock()
        """A tokenizer keeps, from one call to the next, whether it cuts."""
        (blank,) = self._ids([template.replace(PLAIN_TEMPLATE, "")], cut=False)
        if len(blank) < drop:
            raise ConfigError(f"encoder.drop is {drop}, but encoder.template is {len(blank)} tokens alone")
        if len(blank) >= most:
            raise ConfigError(
                f"encoder.max_tokens must be at least {len(blank) - drop + 1}, got {most - drop}: the template and the "
                "tokenizer's own tokens leave no room for a text"
            )

    @property
    def pad(self) -> int | None:
        """The token that texts are padded with, if there is one."""
        token: int | None = self._tokenizer.pad_token_id
        return token

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        if not texts:
            return []
        whole = [self._template.replace(PLAIN_TEMPLATE, text) for text in texts]
        with self._lock:
            found = self._ids(whole, cut=False)
            long = [place for place, ids in enumerate(found) if len(ids) > self._most]
            counts = [len(ids) - self._drop for ids in found]
            if long:  # cutting them here would cut off the tokens that end a text
                cut = self._ids([whole[place] for place in long], cut=True)
                found = [*found]
                for place, ids in zip(long, cut, strict=True):
                    found[place] = ids
        return [Tokens(ids, count) for ids, count in zip(found, counts, strict=True)]

    def _ids(self, texts: list[str], *, cut: bool) -> list[list[int]]:
        how = {"truncation": True, "max_length": self._most} if cut else {"truncation": False}
        ids: list[list[int]] = self._tokenizer(texts, padding=False, verbose=False, **how)["input_ids"]
        return ids


def files_sha256(files: Sequence[tuple[str, Path]]) -> str:
    """Over each file's name and bytes."""
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(json_line({"name": name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}))
    return digest.hexdigest()
