"""Readers fill an encoder's inputs: `make_reader` chooses by the recipe; `reader.py` says what a reader is."""

from cache_store.format.array import ArrayRecipe
from precompute.clips.config import ClipConfig
from precompute.encoders.encoder import TextInputs
from precompute.inputs.busy import BusyTimes
from precompute.inputs.frames import ClipReader, ImageReader
from precompute.inputs.reader import Reader, TextReader
from precompute.sources.images import Images

__all__ = ["Reader", "make_reader"]


def make_reader(
    source: Images,
    array: ArrayRecipe,
    texts: TextInputs | None = None,
    *,
    clips: ClipConfig | None = None,
    busy: BusyTimes | None = None,
    threads: int = 1,
) -> Reader:
    """Make the reader of a cache's samples.

    Planning also gives the config of clips, and the number of threads that read whole images to learn their sizes.
    """
    if array.text is not None:
        assert texts is not None, "an encoder of frames"
        return TextReader(texts, array.text)
    if array.images.clip:
        return ClipReader(source, array.images, clips, busy)
    return ImageReader(source, array.images, busy, threads)
