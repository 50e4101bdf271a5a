"""Load a model's fast tokenizer with its chat template, from a hub id or a folder."""

import json
import threading
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from cache_store.errors import ConfigError, ModelError
from trainer.config import MAX_TOKENS
from trainer.model.pretrained import UNREADABLE_MODEL, explain_unreadable, first_line, pretrained_name
from trainer.text.chat import TEMPLATE_ERRORS, ChatTokenizer

TOKENIZER_FILES = ("tokenizer*", "vocab*", "spiece*")
"""A folder without any such file has no tokenizer, though transformers would make an empty one."""

PROCESSOR_TEMPLATE = "chat_template.json"
"""Older multimodal checkpoints keep their template in this file of their processor, if their tokenizer has none."""

SHOWN_CHARACTERS = 200
"""Longest part shown of Jinja's own message."""

PATIENCE_S, MAX_PROBE = 10.0, 1_000_000
"""Longest time and text that a chat template may take for one word; real ones take milliseconds and a few thousand."""

MAX_TEMPLATE = 1_000_000
"""Most characters of a template's file; real ones have tens of thousands."""


def load_chat_tokenizer(model: str, template_file: str | None, max_tokens: int) -> ChatTokenizer:
    """Load the tokenizer of a hub id or folder, with its own chat template or the one in `template_file`."""
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
    """Read the processor's template; None if there is none."""
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
    """Load a fast tokenizer; labels need its character offsets. Raise ModelError if there is none."""
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


def refuse_broken_template(tokenizer: Any, template: str, where: str) -> None:
    """Raise ConfigError for a template that is broken Jinja, or that makes no text of reasonable size in time."""
    remedy = "correct it, or name another Jinja file in model.chat_template"
    outcome = render_probe(tokenizer, template)
    if isinstance(outcome, TemplateSyntaxError):
        raise ConfigError(
            f"the chat template {where} is broken in line {outcome.lineno}: "
            f"{first_line(outcome)[:SHOWN_CHARACTERS]}; {remedy}"
        )
    if outcome is None or (isinstance(outcome, str) and len(outcome) > MAX_PROBE):
        raise ConfigError(
            f"the chat template {where} turns one word into more than {MAX_PROBE:,} characters, or runs longer than "
            f"{PATIENCE_S:g} s; {remedy}"
        )


def render_probe(tokenizer: Any, template: str) -> str | Exception | None:
    """Render one word; return an error if the template refuses that, as it may, and None if it takes too long.

    A template's loops cannot be stopped. Their thread ends with the program.
    """
    outcome = list[str | Exception]()

    def render() -> None:
        try:
            messages = [{"role": "user", "content": "a"}]
            outcome.append(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
        except TEMPLATE_ERRORS as error:
            outcome.append(error)

    thread = threading.Thread(target=render, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return outcome[0] if outcome else None


def read_template(path: str) -> str:
    try:
        with Path(path).expanduser().open(encoding="utf-8") as stream:  # a device may have no end
            template = stream.read(MAX_TEMPLATE + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template cannot be read: {error}") from None
    if len(template) > MAX_TEMPLATE:
        raise ConfigError(f"model.chat_template cannot be read: {path} has more than {MAX_TEMPLATE:,} characters")
    return template
