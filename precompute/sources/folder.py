"""A tree of images in a folder, a zip or a tar; `name.txt` beside `name.jpg` is its caption."""

from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from itertools import islice

from cache_store.storage.daemon_threads import map_concurrently
from precompute.images.decode import SUFFIXES
from precompute.sources.fields import Conversation, conversation_of, read_caption
from precompute.sources.image_store import ImageStore, head_reader, prefetch_of
from precompute.sources.listing import Samples, counted_suffix, suffix_of

CAPTION = ".txt"

CAPTIONS_AT_ONCE = 1_024
"""Captions in memory at a time if the tree is at a URL; many of them are requested at the same time."""


class FolderSource:
    """The images found are the samples; a sample's id is its name in the tree."""

    def __init__(self, images: ImageStore, *, is_remote: bool = False) -> None:
        self._images, self._is_remote = images, is_remote
        self.locate, self.read, self.expect = images.locate, images.read, prefetch_of(images)
        self.version, self.read_head = images.version, head_reader(images)

    def samples(self) -> Samples:
        names = (listing := self._images.listing()).names
        captions = {text for name in names if is_image(name) and (text := caption_of(name)) in names}
        others = (name for name in names if not is_image(name) and name not in captions)
        bare = sum(caption_of(name) not in captions for name in filter(is_image, names)) if captions else 0
        return Samples(self._samples(names), listing, Counter(map(counted_suffix, others)), uncaptioned=bare)

    def _samples(self, names: Collection[str]) -> Iterator[dict[str, object]]:
        texts = (text if (text := caption_of(name)) in names else None for name in filter(is_image, names))
        for name, turns in zip(filter(is_image, names), self._conversations(texts), strict=True):
            yield {"id": name, "uri": name, "conversations": turns, **self.locate(name).columns()}

    def _conversations(self, texts: Iterator[str | None]) -> Iterator[Conversation]:
        if not self._is_remote:
            yield from map(self._conversation, texts)
            return
        for block in iter(lambda: [*islice(texts, CAPTIONS_AT_ONCE)], []):
            yield from map_concurrently(self._conversation, block)

    def _conversation(self, text: str | None) -> Conversation:
        if text is None:
            return []
        return conversation_of(read_caption(f"caption {text}", partial(self.read, text, self.locate(text).place)))


def is_image(name: str) -> bool:
    """Return whether a name has an image suffix; the content decides how the file is read."""
    return suffix_of(name).lower() in SUFFIXES


def caption_of(image: str) -> str:
    return image.removesuffix(suffix_of(image)) + CAPTION
