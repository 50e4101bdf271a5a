"""Load a model's fast tokenizer with its chat template, from a hub id or a folder."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from cache_store.errors import ConfigError, ModelError
from trainer.model.pretrained import UNREADABLE_MODEL, explain_unreadable, first_line, pretrained_name
from trainer.text.chat import TEMPLATE_ERRORS, ChatTokenizer

TOKENIZER_FILES = ("tokenizer*", "vocab*", "spiece*")
"""Of a folder without any, transformers would make an empty tokenizer."""

PROCESSOR_TEMPLATE = "chat_template.json"
"""File of a processor in which older multimodal checkpoints keep their template."""


def load_chat_tokenizer(model: str, template_file: str | None, max_tokens: int) -> ChatTokenizer:
    tokenizer = load_tokenizer(model)
    if template_file is None:
        template = tokenizer.chat_template or processor_template(model)
    else:
        try:
            template = Path(template_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.chat_template cannot be read: {error}") from None
    if not isinstance(template, str):
        raise ConfigError(f"the tokenizer of {model!r} has no chat template; name a Jinja file in model.chat_template")
    with suppress(*TEMPLATE_ERRORS):  # a template may refuse a conversation without an answer
        try:
            messages = [{"role": "user", "content": "a"}]
            tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        except TemplateSyntaxError as error:
            where = f"of the tokenizer of {model!r}" if template_file is None else template_file
            raise ConfigError(
                f"the chat template {where} is broken in line {error.lineno}: {first_line(error)}; correct it, or name "
                "another Jinja file in model.chat_template"
            ) from None
    return ChatTokenizer(tokenizer, template, max_tokens)


def processor_template(model: str) -> str | None:
    from transformers.utils import cached_file

    quietly = {
        f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")
    }
    path = cached_file(pretrained_name(model), PROCESSOR_TEMPLATE, **quietly)
    if path is None:
        return None
    try:
        template = json.loads(Path(path).read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{PROCESSOR_TEMPLATE} of {model!r} cannot be read: {first_line(error)}") from None
    return template if isinstance(template, str) else None


def load_tokenizer(model: str) -> Any:
    name = pretrained_name(model)
    if Path(name).is_dir() and not any(any(Path(name).glob(files)) for files in TOKENIZER_FILES):
        raise ModelError(f"no tokenizer can be loaded from {model!r}: the folder has no tokenizer files")
    from transformers import AutoTokenizer  # takes seconds to import, and reading a projector does not need it

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except UNREADABLE_MODEL as error:
        raise ModelError(f"no tokenizer can be loaded from {model!r}: {explain_unreadable(error)}") from None
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer of {model!r} is not a fast one (tokenizer.json), which labels need")
    return tokenizer
