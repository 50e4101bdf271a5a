"""A tree of images in a folder, a zip or a tar; `name.txt` beside `name.jpg` is its caption."""

from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from itertools import islice

from cache_store.storage.calls import map_concurrently
from precompute.images.decode import SUFFIXES
from precompute.sources.archives.image_store import ImageStore, expecting
from precompute.sources.archives.names import Names, Samples, counted_suffix, suffix_of
from precompute.sources.fields import Conversation, captioned, text_of

CAPTION = ".txt"

CAPTIONS_AT_ONCE = 1_024
"""In memory, and as many requests at the same time as a process has, where the tree is at a URL."""


class FolderSource:
    """Samples are the images found; a sample's id is its name in the tree."""

    def __init__(self, images: ImageStore, *, are_far: bool = False) -> None:
        self._images, self._are_far = images, are_far
        self.fingerprint, self.read, self.expect = images.fingerprint, images.read, expecting(images)
        self.version = images.version

    def samples(self) -> Samples:
        names = (listing := self._images.listing()).names
        captions = Names(text for name in names if is_image(name) and (text := caption_of(name)) in names)
        others = (name for name in names if not is_image(name) and name not in captions)
        return Samples(self._samples(names), listing, Counter(map(counted_suffix, others)))

    def _samples(self, names: Collection[str]) -> Iterator[dict[str, object]]:
        texts = (text if (text := caption_of(name)) in names else None for name in filter(is_image, names))
        for name, said in zip(filter(is_image, names), self._said(texts), strict=True):
            yield {"id": name, "uri": name, "conversations": said, "fingerprint": self.fingerprint(name)}

    def _said(self, texts: Iterator[str | None]) -> Iterator[Conversation]:
        if not self._are_far:
            yield from map(self._conversations, texts)
            return
        for some in iter(lambda: [*islice(texts, CAPTIONS_AT_ONCE)], []):
            yield from map_concurrently(self._conversations, some)

    def _conversations(self, text: str | None) -> Conversation:
        return [] if text is None else captioned(text_of(f"caption {text}", partial(self.read, text)))


def is_image(name: str) -> bool:
    """Whether the name has an image's suffix; the content decides how the file is read."""
    return suffix_of(name).lower() in SUFFIXES


def caption_of(image: str) -> str:
    return image.removesuffix(suffix_of(image)) + CAPTION
