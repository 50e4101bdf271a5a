"""A model's fast tokenizer with its chat template, from a hub id or a folder; the messages where there is none."""

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from cache_store.errors import ConfigError, ModelError
from trainer.config import MAX_TOKENS
from trainer.model.pretrained import (
    UNREADABLE_MODEL,
    first_line,
    pretrained_name,
    refuse_unreachable,
    why_unreadable,
)
from trainer.text.chat import TEMPLATE_ERRORS, ChatTokenizer

TOKENIZER_FILES = ("tokenizer*", "vocab*", "spiece*")
"""A folder without any such file has no tokenizer, though transformers would make an empty one."""

PROCESSOR_TEMPLATE = "chat_template.json"
"""Where older multimodal checkpoints keep their processor's template, if their tokenizer has none."""

SHOWN_CHARACTERS = 200
"""Most characters shown of Jinja's own message."""


def load_chat_tokenizer(model: str, template_file: str | None, max_tokens: int) -> ChatTokenizer:
    """Load the tokenizer of a hub id or folder, with a template of its own or from `template_file`."""
    tokenizer = load_tokenizer(model)
    if template_file is None:
        template = tokenizer.chat_template or processor_template(model)
    else:
        template = read_template(template_file)
    if not isinstance(template, str):
        raise ConfigError(f"the tokenizer of {model!r} has no chat template; name a Jinja file in model.chat_template")
    where = f"of the tokenizer of {model!r}" if template_file is None else template_file
    refuse_broken_template(tokenizer, template, where)
    return ChatTokenizer(tokenizer, template, max_tokens)


def processor_template(model: str) -> str | None:
    """Read the processor's template; None where there is none."""
    from transformers.utils import cached_file

    quietly = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
        "_raise_exceptions_for_gated_repo": False,
    }
    path = cached_file(pretrained_name(model), PROCESSOR_TEMPLATE, **quietly)
    if path is None:
        return None
    try:
        template = json.loads(Path(path).read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{PROCESSOR_TEMPLATE} of {model!r} cannot be read: {first_line(error)}") from None
    return template if isinstance(template, str) else None


def prompt_tokenizer(model: str, template: str) -> ChatTokenizer:
    """Load the tokenizer of a hub id or folder to prompt with, in the template that a projector was trained with."""
    return ChatTokenizer(load_tokenizer(model), template, MAX_TOKENS)


def load_tokenizer(model: str) -> Any:
    """Load a fast tokenizer, which labels need."""
    name = pretrained_name(model)
    if Path(name).is_dir() and not any(any(Path(name).glob(files)) for files in TOKENIZER_FILES):
        raise ModelError(f"no tokenizer can be loaded from {model!r}: no file there is a tokenizer's")
    refuse_unreachable(name)
    from transformers import AutoTokenizer  # it takes seconds, and a projector is read without it

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except UNREADABLE_MODEL as error:
        raise ModelError(f"no tokenizer can be loaded from {model!r}: {why_unreadable(error)}") from None
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer of {model!r} is not a fast one (tokenizer.json), which labels need")
    return tokenizer


def refuse_broken_template(tokenizer: Any, template: str, where: str) -> None:
    """Raise ConfigError for a template that is no Jinja; one that refuses a conversation may take others."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template {where} is broken in line {error.lineno}: {first_line(error)[:SHOWN_CHARACTERS]}; "
            "mend it, or name another Jinja file in model.chat_template"
        ) from None
    except TEMPLATE_ERRORS:
        return  # perhaps of this conversation alone; each sample's own problem is reported with its name


def read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template cannot be read: {error}") from None
