"""Read a cache's source images as its encoder saw them, for `cache_store.cache.entry_points`. Needs no torch."""

from collections.abc import Mapping
from typing import Any

from cache_store.cache.entry_points import Frames, ReadImage
from cache_store.cache.metadata import read_spec
from cache_store.errors import SourceError
from cache_store.format.array import ArraySpec
from cache_store.storage.store import Address
from precompute.config import BuildConfig
from precompute.images.decode import silence_decoders
from precompute.inputs import make_reader
from precompute.inputs.reader import read_one
from precompute.sources.opening import open_source


def open_source_images(cache: Address) -> ReadImage:
    """Open a reader of the recorded source: a sample's frames as encoded, and the file's SHA-256, or SourceError."""
    built = BuildConfig.of_cache(cache)
    if built.encoder.reads_text:
        raise SourceError("it was made from texts")
    reader = make_reader(open_source(built.source, built.media), read_spec(cache).array)
    silence_decoders()

    def read(sample: Mapping[str, Any], array: ArraySpec) -> tuple[Frames, str]:
        try:
            frames, outcome = read_one(reader, {"fingerprint": "", **sample}, array)
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror or error}") from None
        if outcome.reason is not None or outcome.content_sha256 is None:
            raise SourceError(str(outcome.reason))
        return frames, outcome.content_sha256

    return read
