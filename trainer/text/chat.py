"""Turn conversations into tokens with the tokenizer's chat template, and mark the tokens that are learned.

Labels are the assistant's words and the end of its turn; an empty turn has none. A turn's place in the text is found by
rendering the messages before it with the template's own generation prompt, so no template has to be known here. If a
template writes no end of turn, as LLaVA 1.5's, EOS is put after the last turn, or answers would never end.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from jinja2 import TemplateError

from cache_store.errors import ConfigError, SourceError
from trainer.model.pretrained import first_line
from trainer.text.special_text import MASK, Span, SpecialText, mask_words

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

MARKER = "<image>"
IMAGE_MARKER = re.compile(rf"(?<![ \t])[ \t]*{MARKER}\n?")
"""LLaVA's marker for the image, removed. The lookbehind keeps long runs of blanks fast."""

TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, ArithmeticError),
    *(LookupError, AttributeError, RecursionError, MemoryError),
)
"""Exceptions of Jinja, and of code in a template."""

KEPT_PROMPTS = 256
"""Rendered prompts to keep: captions share a few questions."""

Message = dict[str, str]


@dataclass(frozen=True)
class TokenizedText:
    """One sample's tokens and labels; empty if it has nothing to learn."""

    tokens: np.ndarray
    """int32 [tokens]"""
    is_label: np.ndarray
    """bool [tokens]"""
    problem: str = ""
    """Why a sample that has words has no tokens."""


@dataclass(frozen=True)
class Rendered:
    """A sample's rendered text, and the places of the assistant's turns in it."""

    text: str = ""
    masked: str = ""
    """The same turns, rendered with every word masked."""
    spans: Sequence[Span] = ()
    """The assistant's turns in `text`, each with its end of turn."""
    problem: str = ""


def has_moved_image(conversation: Sequence[Message]) -> bool:
    """Return whether an image marker is anywhere but at the beginning, where an image's tokens are put."""
    text = "\n".join(turn["value"] or "" for turn in conversation)
    return MARKER in text and (text.count(MARKER) > 1 or not text.lstrip().startswith(MARKER))


def to_messages(conversation: Sequence[Message]) -> list[Message]:
    """Turn LLaVA's turns into chat messages without image markers; an empty user turn stands before a first answer."""
    messages = []
    for turn in conversation:
        if turn["from"] not in ROLES:
            raise SourceError(f"unknown role {turn['from']!r}; known are {', '.join(ROLES)}")
        content = IMAGE_MARKER.sub("", turn["value"] or "").strip()
        messages.append({"role": ROLES[turn["from"]], "content": content})
    if messages and messages[0]["role"] == "assistant":
        messages.insert(0, {"role": "user", "content": ""})
    return messages


class ChatTokenizer:
    """A fast tokenizer with its chat template."""

    def __init__(self, tokenizer: Any, template: str, max_tokens: int) -> None:
        self.tokenizer, self.template, self.max_tokens = tokenizer, template, max_tokens
        self.special = SpecialText(tokenizer)
        self._prompt = lru_cache(KEPT_PROMPTS)(lambda before: self._render(json.loads(before), True))

    @property
    def begins_with_bos(self) -> bool:
        return self.tokenizer.bos_token_id is not None

    @property
    def facts(self) -> dict[str, str]:
        """Everything that decides a text's tokens and labels, by name."""
        special = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}  # templates see them
        return {
            "tokenizer": sha256_of([self.tokenizer.backend_tokenizer.to_str(), special]),
            "chat template": sha256_of([self.template, self.has_content_parts, self.end_token is not None]),
            "data.max_text_tokens": str(self.max_tokens),
        }

    @property
    def digest(self) -> str:
        return sha256_of(self.facts)

    @cached_property
    def has_content_parts(self) -> bool:
        """Whether the template reads a message's content only as a list of parts, as LLaVA's does."""
        texts = [self._try_render([{"role": "user", "content": each}]) for each in (MASK, as_parts(MASK))]
        return [MASK in text for text in texts] == [False, True]

    @cached_property
    def end_token(self) -> int | None:
        """EOS, if the template writes nothing after the assistant's words; else None."""
        words, after = self._render_answer()
        eos: int | None = self.tokenizer.eos_token_id
        return eos if words and not after else None

    def __call__(self, ids: Sequence[str], conversations: Sequence[Sequence[Message]]) -> list[TokenizedText]:
        """Tokenise each conversation to at most `max_tokens`, and label the assistant's words."""
        rendered = [self._render_sample(*sample) for sample in zip(ids, conversations, strict=True)]
        encoded = self.tokenizer(
            [each.text for each in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
        )
        samples = zip(ids, encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True)
        return [self._label(*sample) for sample in samples]

    def prompt_tokens(self, messages: list[Message]) -> np.ndarray:
        """Tokenise messages as training did, up to the assistant's first word: int32 [tokens].

        Raise SourceError if the template refuses them, or if a special token's text in them cannot be spelled out.
        """
        try:
            text, masked_text = self._render_twice(messages, add_generation_prompt=True)
        except TEMPLATE_ERRORS as error:
            raise SourceError(f"the chat template refuses it: {first_line(error)}") from None
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, _ = self.special.spell_out(encoded["input_ids"], encoded["offset_mapping"], text, masked_text)
        return np.array([*self._bos_before(tokens), *tokens], np.int32)

    def _bos_before(self, tokens: Sequence[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        return [bos] if self.begins_with_bos and tokens[:1] != [bos] else []

    def end_of_turn(self) -> str:
        """Find the text after the assistant's words, without white space around it; empty if the template refuses."""
        return self._render_answer()[1]

    def _render_answer(self) -> tuple[str, str]:
        messages = [{"role": "user", "content": MASK}, {"role": "assistant", "content": MASK}]
        _, words, after = self._try_render(self._in_template_form(messages)).rpartition(MASK)
        return words, after.strip()

    def _render_sample(self, sample_id: str, conversation: Sequence[Message]) -> Rendered:
        """Render the turns up to the assistant's last words; empty if it says nothing or cannot be rendered."""
        try:
            messages = to_messages(conversation)
            turns = [turn for turn, each in enumerate(messages) if each["role"] == "assistant" and each["content"]]
            if not turns:
                return Rendered()
            text, masked_text = self._render_twice(messages[: turns[-1] + 1])
            before = [self._span(messages, turn, self._render(messages[: turn + 1]), text) for turn in turns[:-1]]
            return Rendered(text, masked_text, [*before, self._span(messages, turns[-1], text, text)])
        except SourceError as error:
            return Rendered(problem=f"sample {sample_id!r}: {error}")
        except TEMPLATE_ERRORS as error:
            return Rendered(problem=f"sample {sample_id!r}: the chat template refuses it: {first_line(error)}")

    def _render_twice(self, messages: list[Message], add_generation_prompt: bool = False) -> tuple[str, str]:
        """Render messages as they are and masked; places in both are the same, unless the template rewrites words."""
        masked_messages = [{**message, "content": mask_words(message["content"])} for message in messages]
        text, masked_text = (self._render(each, add_generation_prompt) for each in (messages, masked_messages))
        if len(masked_text) != len(text) and any(self.special.controls(message["content"]) for message in messages):
            raise SourceError("it contains the text of a special token, and the chat template rewrites words")
        return text, masked_text

    def _span(self, messages: list[Message], turn: int, through: str, text: str) -> Span:
        """Find `messages[turn]` in `text`, with its end of turn but not the white space after that.

        `through` is the rendering of the messages up to it.
        """
        before = json.dumps(messages[:turn])  # a text can be a key
        prefix, through = self._prompt(before), through.rstrip()
        if not (text.startswith(through) and through.startswith(prefix)):
            raise ConfigError(
                "the chat template renders a conversation's beginning differently once more turns follow, so the "
                "assistant's part cannot be found; set model.chat_template to one that only appends"
            )
        return len(prefix), len(through)

    def _render(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        text: str = self.tokenizer.apply_chat_template(
            self._in_template_form(messages),
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        return text

    def _in_template_form(self, messages: list[Message]) -> list[Any]:
        if not self.has_content_parts:
            return messages
        return [{**message, "content": as_parts(message["content"])} for message in messages]

    def _try_render(self, messages: list[Any]) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(messages, chat_template=self.template, tokenize=False)
        except TEMPLATE_ERRORS:
            return ""
        return text

    def _label(self, sample_id: str, tokens: list[int], offsets: list[Span], rendered: Rendered) -> TokenizedText:
        """Return the sample's tokens, with BOS and cut to length; labels are the tokens that begin inside a span."""
        try:
            tokens, offsets = self.special.spell_out(tokens, offsets, rendered.text, rendered.masked)
        except SourceError as error:
            return TokenizedText(np.array([], np.int32), np.array([], bool), f"sample {sample_id!r}: {error}")
        is_label = is_within(offsets, rendered.spans)
        if bos := self._bos_before(tokens):
            tokens, is_label = [*bos, *tokens], np.concatenate([[False], is_label])
        if self.end_token is not None and is_label.any():
            tokens, is_label = [*tokens, self.end_token], np.concatenate([is_label, [True]])
        length = length_to_keep(is_label, self.max_tokens)
        return TokenizedText(np.array(tokens[:length], np.int32), is_label[:length], rendered.problem)


def sha256_of(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def as_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def is_within(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    begins = np.array([begin for begin, _ in offsets], np.int64)
    inside = np.zeros(len(offsets), bool)
    for first, end in spans:
        inside |= (first <= begins) & (begins < end)
    return inside


def length_to_keep(is_label: np.ndarray, max_tokens: int) -> int:
    """Count the tokens to keep: at most `max_tokens`, and none after the last label, which cannot change the loss."""
    labels = np.flatnonzero(is_label[:max_tokens])
    return int(labels[-1]) + 1 if len(labels) else 0
