"""A reader fills the places of a batch with frames of images and videos, or with tokens of texts."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.cache.writer import Outcome
from cache_store.format.array import ArraySpec, Size, TextRecipe
from cache_store.format.plan import text_of
from precompute.encoders.encoder import NO_TOKEN, TextInputs
from precompute.images.decode import content_sha256
from precompute.images.fit import MID_GREY
from precompute.images.rejected import Rejected
from precompute.sources.listing import Samples

# Axes: T frames, or tokens of a text, Y X pixels, 3 RGB.

Sample = Mapping[str, Any]
"""A row of the plan, with a reader's columns."""

Inputs = NDArray[np.integer[Any]]
"""The place of one sample: uint8 pixels [T, Y, X, 3], or int32 tokens [T]."""


class Reader(ABC):
    """Reads samples of a cache's source, for several threads."""

    columns: Sequence[str]
    """Columns of the plan that it needs of a sample."""
    null_inputs: Inputs | None = None
    """The null prompt's tokens; None if the cache has no texts."""

    def samples(self, listed: Samples, planned: Iterable[pa.Table] = ()) -> Samples:
        """Return the samples of listed files; `planned` has the parts of an earlier plan, made with the same config."""
        return listed

    @abstractmethod
    def size(self, sample: Sample) -> Size | None:
        """Return the size of a sample's file, with the frames that its clip will have; None if it cannot be read."""

    def expect(self, samples: Iterable[Sample]) -> None:  # noqa: B027 (most are not fetched ahead)
        """Learn which samples are read next, so that those at a URL can be fetched ahead."""

    @abstractmethod
    def read(self, samples: Sequence[Sample], array: ArraySpec, out: Sequence[Inputs]) -> list[Outcome]:
        """Fill a place for each sample, and say what became of it; the place of a rejected one is undefined."""

    @abstractmethod
    def digest(self, sample: Sample) -> str:
        """Return the SHA-256 of a sample's file or text, as `read` gives it; raise Rejected if it cannot be read."""


class InputLayout(NamedTuple):
    """Shape and dtype of the place of one sample."""

    shape: tuple[int, ...]
    dtype: type[np.integer[Any]]
    filler: int
    """Fills the places of rejected samples, and the unused ones of a short batch."""


def inputs_of(array: ArraySpec) -> InputLayout:
    if array.text is not None:
        return InputLayout((array.text.drop + array.text.max_tokens,), np.int32, NO_TOKEN)
    return InputLayout((*array.size, 3), np.uint8, MID_GREY)


def read_one(reader: Reader, sample: Sample, array: ArraySpec) -> tuple[NDArray[Any], Outcome]:
    shape, dtype, _ = inputs_of(array)
    place = np.empty(shape, dtype)
    (outcome,) = reader.read([sample], array, [place])
    return place, outcome


NO_TEXT = Rejected("no text", "the sample has no caption")


class TextReader(Reader):
    """Makes tokens of the texts that stand in the plan."""

    columns: Sequence[str] = ("id", "conversations")

    def __init__(self, encoder: TextInputs, recipe: TextRecipe) -> None:
        self._encoder, self._recipe = encoder, recipe
        self.null_inputs = np.array(encoder.null_ids, np.int32)

    def size(self, sample: Sample) -> Size | None:
        return Size(1, 1, self._recipe.max_tokens)

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
