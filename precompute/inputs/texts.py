"""Texts of the plan as tokens."""

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from cache_store.cache.writer import Outcome
from cache_store.format.array import ArraySpec, Size, TextRecipe
from cache_store.format.plan import text_of
from precompute.encoders.encoder import NO_TOKEN, TextInputs
from precompute.images.decode import content_sha256
from precompute.images.rejected import Rejected
from precompute.inputs.reader import Inputs, Sample
from precompute.sources.listing import Samples

NO_TEXT = Rejected("no text", "the sample has no caption")


class TextReader:
    """Makes tokens of the texts that stand in the plan."""

    columns: Sequence[str] = ("id", "conversations")

    def __init__(self, encoder: TextInputs, recipe: TextRecipe) -> None:
        self._encoder, self._recipe = encoder, recipe
        self.null_inputs: Inputs | None = np.array(encoder.null_ids, np.int32)

    def samples(self, listed: Samples, planned: Iterable[pa.Table] = ()) -> Samples:
        return listed

    def size(self, sample: Sample) -> Size | None:
        return Size(1, 1, self._recipe.max_tokens)

    def expect(self, samples: Iterable[Sample]) -> None:
        """Do nothing: the texts are there."""

    def read(self, samples: Sequence[Sample], array: ArraySpec, out: Sequence[Inputs]) -> list[Outcome]:
        texts, outcomes = [self._text(sample) for sample in samples], list[Outcome]()
        made = iter(self._encoder.tokens([text for text in texts if text is not None]))
        for text, place in zip(texts, out, strict=True):
            if text is None:
                outcomes.append(Outcome(content_sha256=None, reason=NO_TEXT.reason))
                continue
            tokens = next(made)
            place[:] = NO_TOKEN
            place[: len(tokens.ids)] = tokens.ids
            outcomes.append(Outcome(content_sha256=content_sha256(text.encode()), tokens=tokens.whole))
        return outcomes

    def digest(self, sample: Sample) -> str:
        if (text := self._text(sample)) is None:
            raise NO_TEXT
        return content_sha256(text.encode())

    def _text(self, sample: Sample) -> str | None:
        return text_of(self._recipe, sample["id"], sample["conversations"])
