"""Text in a conversation that looks like a special token is data: it is tokenised like any other words.

A tokenizer reads `<end_of_turn>` in a caption as the token that ends a turn. So the conversation is rendered again with
every letter masked (`mask_words`): the special tokens that remain are the template's own. Each other one in the real
text is replaced by the tokens that spell it (`spell_out`). The result must have exactly the template's own special
tokens, by id and place, or the sample is refused.
"""

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models

from cache_store.errors import SourceError

MASK = "\ue000"
"""A private-use Unicode character. A conversation may still contain it."""

Span = tuple[int, int]

Control = tuple[int, int]
"""A special token's id and the place of its first visible character."""


def mask_words(content: str) -> str:
    """Replace every letter; white space stays, since templates trim it."""
    return re.sub(r"\S", MASK, content)


def visible_start(text: str, span: Span) -> int:
    """Find the first visible character; tokenizers differ in whether offsets hold white space before it."""
    return span[1] - len(text[slice(*span)].lstrip())


class SpecialText:
    """The special tokens that a fast tokenizer finds in a text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added_tokens = tokenizer.added_tokens_decoder
        self.texts: dict[int, str] = {token: added.content for token, added in added_tokens.items() if added.special}
        self._finder = Tokenizer(models.BPE())  # it has no vocabulary, so it finds only added tokens
        self._finder.normalizer = tokenizer.backend_tokenizer.normalizer
        self._finder.add_tokens(list(added_tokens.values()))
        self._special = {self._finder.token_to_id(text): token for token, text in self.texts.items()}
        """The tokenizer's token ids, keyed by the finder's ids."""

    def controls(self, text: str) -> dict[Control, Span]:
        found = self._finder.encode(text, add_special_tokens=False)
        spans = zip(map(self._special.get, found.ids), found.offsets, strict=True)
        return {(token, visible_start(text, span)): span for token, span in spans if token is not None}

    def spell_out(
        self, tokens: Sequence[int], offsets: Sequence[Span], text: str, masked_text: str
    ) -> tuple[list[int], list[Span]]:
        """Return the tokens of `text` and their offsets, with no special tokens but the chat template's own.

        `masked_text` is the template's rendering of masked words. SourceError if this cannot be done exactly.
        """
        own, found = self.controls(masked_text), self.controls(text)
        if len(text) != len(masked_text):  # places cannot be compared then, only the order
            if [token for token, _ in own] != [token for token, _ in found]:
                raise SourceError("the chat template rewrites its words in a way that changes the special tokens in it")
            own = found
        spoken = {control: span for control, span in found.items() if control not in own}
        spelled, spans = list[int](), list[Span]()
        for token, span in zip(tokens, offsets, strict=True):
            swallowed = spoken.get((token, visible_start(text, span))) if token in self.texts else None
            new_tokens, new_spans = ([token], [span]) if swallowed is None else self._spell(text, swallowed)
            spelled += new_tokens
            spans += new_spans
        self._refuse_other_controls(spelled, spans, text, own)
        return spelled, spans

    def _spell(self, text: str, span: Span) -> tuple[list[int], list[Span]]:
        """Tokenise this part of `text` as words; the offsets are in `text`."""
        words = text[slice(*span)]
        spelled = self.tokenizer(
            words, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
        )
        if self.texts.keys() & spelled["input_ids"]:
            raise SourceError(f"it says {words.strip()!r}, which this tokenizer can only encode as a special token")
        return spelled["input_ids"], [(span[0] + begin, span[0] + end) for begin, end in spelled["offset_mapping"]]

    def _refuse_other_controls(
        self, tokens: Sequence[int], spans: Sequence[Span], text: str, own: dict[Control, Span]
    ) -> None:
        """Raise SourceError unless the special tokens, but the unknown one, are exactly the template's own."""
        unknown = self.tokenizer.unk_token_id
        left = {
            (token, visible_start(text, span))
            for token, span in zip(tokens, spans, strict=True)
            if token in self.texts and token != unknown
        }
        differing = left ^ {control for control in own if control[0] != unknown}
        if differing:
            token, first = min(differing, key=lambda control: control[1])
            raise SourceError(
                f"its words change the places at which the tokenizer finds {self.texts[token]!r}, at {first:,}"
            )
