"""What a conversation says in the words of a special token is data: spelled out as any words are, and never control.

A tokenizer takes `<end_of_turn>` in a caption for the token that ends a turn. The chat template's own are those that
it also writes around masked words: the conversation is rendered a second time, every letter replaced (`masked`). The
text itself is what is tokenised; then each special token that stands in it and not in the masked one is replaced by
the tokens that spell it (`spell_out`). What comes out is held to the template's own special tokens, id by id and place
by place, so that whatever a template or a tokenizer does to words, they are spelled or their sample is refused.
"""

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models

from cache_store.errors import SourceError

MASK = "\ue000"
"""One of Unicode's characters for private use; a conversation may hold it all the same."""

Span = tuple[int, int]

Control = tuple[int, int]
"""A special token and where its first visible character stands: it may swallow white space before that."""


def masked(content: str) -> str:
    """Replace every letter; white space stays, since templates trim it."""
    return re.sub(r"\S", MASK, content)


def visible_start(text: str, span: Span) -> int:
    """Find the first character that is no white space: tokenizers differ in whether a token's offsets hold that."""
    return span[1] - len(text[slice(*span)].lstrip())


class SpecialText:
    """The special tokens that a fast tokenizer finds in a text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added_tokens = tokenizer.added_tokens_decoder
        self.texts: dict[int, str] = {token: added.content for token, added in added_tokens.items() if added.special}
        self._finder = Tokenizer(models.BPE())  # without a vocabulary: added tokens are all that it finds
        self._finder.normalizer = tokenizer.backend_tokenizer.normalizer
        self._finder.add_tokens(list(added_tokens.values()))
        self._special = {self._finder.token_to_id(text): token for token, text in self.texts.items()}
        """Tokens by the finder's own numbers."""

    def controls(self, text: str) -> dict[Control, Span]:
        """Find the special tokens in `text`, each with all that it swallows of it."""
        found = self._finder.encode(text, add_special_tokens=False)
        spans = zip(map(self._special.get, found.ids), found.offsets, strict=True)
        return {(token, visible_start(text, span)): span for token, span in spans if token is not None}

    def spell_out(
        self, tokens: Sequence[int], offsets: Sequence[Span], text: str, masked_text: str
    ) -> tuple[list[int], list[Span]]:
        """Return the tokens of `text` with their offsets, no special token among them but the chat template's own.

        `masked_text` is the template's rendering of masked words. SourceError where that cannot be reached.
        """
        own, found = self.controls(masked_text), self.controls(text)
        if len(text) != len(masked_text):  # then places do not compare, and only order tells
            if [token for token, _ in own] != [token for token, _ in found]:
                raise SourceError("the chat template's changes to its words change the special tokens in it")
            own = found
        said = {control: span for control, span in found.items() if control not in own}
        spelled, spans = list[int](), list[Span]()
        for token, span in zip(tokens, offsets, strict=True):
            swallowed = said.get((token, visible_start(text, span))) if token in self.texts else None
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
            raise SourceError(f"it says {words.strip()!r}, which this tokenizer has as a special token only")
        return spelled["input_ids"], [(span[0] + begin, span[0] + end) for begin, end in spelled["offset_mapping"]]

    def _refuse_other_controls(
        self, tokens: Sequence[int], spans: Sequence[Span], text: str, own: dict[Control, Span]
    ) -> None:
        """Raise SourceError unless exactly the template's own special tokens are left; unknown words aside."""
        unknown = self.tokenizer.unk_token_id
        left = {
            (token, visible_start(text, span))
            for token, span in zip(tokens, spans, strict=True)
            if token in self.texts and token != unknown
        }
        differing = left ^ {control for control in own if control[0] != unknown}
        if differing:
            token, first = min(differing, key=lambda control: control[1])
            raise SourceError(f"its words change where the tokenizer finds {self.texts[token]!r}, at {first:,}")
