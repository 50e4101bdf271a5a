"""What a conversation says in the words of a special token is data: spelled out as any words are, and never control.

A tokenizer takes `<end_of_turn>` in a caption for the token that ends a turn. To tell it from the chat template's own,
the conversation is rendered a second time with such words masked at equal length (`mask`). The text itself is what is
tokenised; then each special token that stands where the other rendering has the mask is replaced by the tokens that
spell it (`spell_masked`).
"""

import re
from collections.abc import Sequence
from typing import Any

from cache_store.errors import SourceError

MASK = "\ue000"
"""Of Unicode's characters for private use; a conversation may hold it all the same."""

Span = tuple[int, int]


class SpecialText:
    """The texts that a fast tokenizer takes for special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added_tokens = tokenizer.added_tokens_decoder.items()
        self.texts: dict[int, str] = {token: added.content for token, added in added_tokens if added.special}
        longest_first = sorted(filter(None, self.texts.values()), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def mask(self, content: str) -> str:
        """`content` with such words masked; SourceError for those that no other tokens spell."""
        for text in set(self.pattern.findall(content)):
            if self.texts.keys() & self.spell(text):
                raise SourceError(f"it says {text!r}, which this tokenizer has as a special token only")
        return self.pattern.sub(lambda found: MASK * len(found[0]), content)

    def spell(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return tokens

    def spell_masked(
        self, tokens: Sequence[int], offsets: Sequence[Span], text: str, masked: str
    ) -> tuple[list[int], list[Span]]:
        """Tokens of `text` and where in it they stand, with every masked special token in the tokens that spell it.

        Each of those stands where the special token stood.
        """
        spelled, places = list[int](), list[Span]()
        for token, (begin, end) in zip(tokens, offsets, strict=True):
            is_data = token in self.texts and MASK in masked[begin:end]
            parts = self.spell(text[begin:end]) if is_data else [token]
            spelled += parts
            places += [(begin, end)] * len(parts)
        return spelled, places
