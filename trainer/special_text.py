"""The text of a special token in a conversation is data: spelled out as any words are, and never control.

Where it stands is seen in a second rendering of the conversation, with such texts masked at equal length; special
tokens elsewhere are the chat template's own.
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
        self.texts = {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        longest_first = sorted(filter(None, self.texts.values()), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def mask(self, content: str) -> str:
        """The content with such texts masked; SourceError for one that no other tokens spell."""
        for text in set(self.pattern.findall(content)):
            if self.texts.keys() & self.spell(text):
                raise SourceError(f"it says {text!r}, which this tokenizer has as a special token only")
        return self.pattern.sub(lambda found: MASK * len(found[0]), content)

    def spell(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return tokens

    def spell_masked(
        self, tokens: Sequence[int], offsets: Sequence[Span], text: str, masked: str
    ) -> list[tuple[int, Span]]:
        """Tokens of `text` and where in it each stands; all parts of a special one stand where it stood."""
        placed: list[tuple[int, Span]] = []
        for token, (begin, end) in zip(tokens, offsets, strict=True):
            is_data = token in self.texts and MASK in masked[begin:end]
            placed += [(part, (begin, end)) for part in (self.spell(text[begin:end]) if is_data else [token])]
        return placed
