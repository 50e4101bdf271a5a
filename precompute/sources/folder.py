"""A tree of images or videos in a folder, a zip or a tar; `name.txt` beside `name.jpg` is its caption."""

from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from itertools import islice

from cache_store.storage.daemon_threads import map_concurrently
from precompute.sources.fields import Conversation, conversation_of, read_caption
from precompute.sources.image_store import ImageStore, head_reader, prefetch_of, stream_opener
from precompute.sources.listing import Samples, counted_suffix, suffix_of
from precompute.sources.media import IMAGES, Media

CAPTION = ".txt"

CAPTIONS_AT_ONCE = 1_024
"""Captions in memory at a time if the tree is at a URL; many of them are requested at the same time."""


class FolderSource:
    """The files found of one kind of media are the samples; a sample's id is its name in the tree."""

    def __init__(self, images: ImageStore, *, is_remote: bool = False, media: Media = IMAGES) -> None:
        self._images, self._is_remote, self._media = images, is_remote, media
        self.locate, self.read, self.expect = images.locate, images.read, prefetch_of(images)
        self.version, self.read_head, self.open = images.version, head_reader(images), stream_opener(images)

    def samples(self) -> Samples:
        names, is_sample = (listing := self._images.listing()).names, self._media.includes
        captions = {text for name in names if is_sample(name) and (text := caption_of(name)) in names}
        others = Counter(counted_suffix(name) for name in names if not is_sample(name) and name not in captions)
        bare = sum(caption_of(name) not in captions for name in filter(is_sample, names)) if captions else 0
        return Samples(self._samples(names), listing, others, uncaptioned=bare, media=self._media.name)

    def _samples(self, names: Collection[str]) -> Iterator[dict[str, object]]:
        is_sample = self._media.includes
        texts = (text if (text := caption_of(name)) in names else None for name in filter(is_sample, names))
        for name, turns in zip(filter(is_sample, names), self._conversations(texts), strict=True):
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


def caption_of(image: str) -> str:
    return image.removesuffix(suffix_of(image)) + CAPTION
