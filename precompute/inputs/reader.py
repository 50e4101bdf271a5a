"""A reader fills the places of a batch with frames of images and videos, or with tokens of texts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache_store.cache.writer import Outcome
from cache_store.format.array import ArraySpec, Size
from precompute.encoders.encoder import NO_TOKEN
from precompute.images.fit import MID_GREY
from precompute.sources.listing import Samples

# Axes: T frames, or tokens of a text, Y X pixels, 3 RGB.

Sample = Mapping[str, Any]
"""A row of the plan, with a reader's columns."""

Inputs = NDArray[np.integer[Any]]
"""The place of one sample: uint8 pixels [T, Y, X, 3], or int32 tokens [T]."""


class Reader(Protocol):
    """Reads samples of a cache's source, for several threads."""

    columns: Sequence[str]
    """Columns of the plan that it needs of a sample."""
    null_inputs: Inputs | None
    """The null prompt's tokens; None if the cache has no texts."""

    def samples(self, listed: Samples, planned: Iterable[pa.Table] = ()) -> Samples:
        """Return the samples of listed files, which may be several of a file; `planned` has the parts of an earlier
        plan, made with the same config.
        """

    def size(self, sample: Sample) -> Size | None:
        """Return the size of a sample's file, with the frames that its clip will have; None if it cannot be read."""

    def expect(self, samples: Iterable[Sample]) -> None:
        """Learn which samples are read next, so that those at a URL can be fetched ahead."""

    def read(self, samples: Sequence[Sample], array: ArraySpec, out: Sequence[Inputs]) -> list[Outcome]:
        """Fill a place for each sample, and say what became of it; the place of a rejected one is undefined."""

    def digest(self, sample: Sample) -> str:
        """Return the SHA-256 of a sample's file or text, as `read` gives it; raise Rejected if it cannot be read."""


class InputLayout(NamedTuple):
    """Shape and dtype of the place of one sample."""

    shape: tuple[int, ...]
    dtype: type[np.integer[Any]]
    filler: int
    """Fills the places of rejected samples, and the unused ones of a short batch."""


def inputs_of(array: ArraySpec) -> InputLayout:
    """Return the input of the array's encoder for one sample."""
    if array.text is not None:
        return InputLayout((array.text.drop + array.text.max_tokens,), np.int32, NO_TOKEN)
    return InputLayout((*array.size, 3), np.uint8, MID_GREY)


def read_one(reader: Reader, sample: Sample, array: ArraySpec) -> tuple[NDArray[Any], Outcome]:
    """Read a sample into a place of its own."""
    shape, dtype, _ = inputs_of(array)
    place = np.empty(shape, dtype)
    (outcome,) = reader.read([sample], array, [place])
    return place, outcome
