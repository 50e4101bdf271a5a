"""A tree of images or videos in a folder, a zip or a tar; `name.txt` beside `name.jpg` is its caption."""

from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from itertools import islice

from cache_store.storage.daemon_threads import map_concurrently
from precompute.sources.fields import Conversation, conversation_of, read_caption
from precompute.sources.images import ImagesOf, ImageStore, Source
from precompute.sources.listing import BadFiles, Samples, counted_suffix, is_mask, suffix_of
from precompute.sources.media import IMAGES, Media

CAPTION = ".txt"

CAPTIONS_AT_ONCE = 1_024
"""Captions in memory at a time if the tree is at a URL; many of them are requested at the same time."""


class FolderSource(ImagesOf, Source):
    """The files found of one kind of media are the samples; a sample's id is its name in the tree."""

    def __init__(self, images: ImageStore, *, is_remote: bool = False, media: Media = IMAGES) -> None:
        super().__init__(images)
        self._tree, self._is_remote, self._media = images, is_remote, media

    def version(self) -> str | None:
        return self._tree.version()

    def samples(self) -> Samples:
        names, includes = (listing := self._tree.listing()).names, self._media.includes
        masks = [name for name in names if is_mask(name) and includes(name)]
        captions = {text for name in names if includes(name) and (text := caption_of(name)) in names}
        others = Counter(counted_suffix(name) for name in names if not includes(name) and name not in captions)
        return Samples(self._samples(names), listing, others, masks=masks, media=self._media.name)

    def _is_sample(self, name: str) -> bool:
        return self._media.includes(name) and not is_mask(name)

    def _samples(self, names: Collection[str]) -> Iterator[dict[str, object]]:
        bad, samples = BadFiles(), [*filter(self._is_sample, names)]
        texts = (text if (text := caption_of(name)) in names else None for name in samples)
        for name, turns in zip(samples, self._conversations(texts, bad), strict=True):
            yield {"id": name, "uri": name, "conversations": turns, **self.locate(name).columns()}
        bad.refuse()

    def _conversations(self, texts: Iterator[str | None], bad: BadFiles) -> Iterator[Conversation]:
        conversation = partial(self._conversation, bad)
        if not self._is_remote:
            yield from map(conversation, texts)
            return
        for block in iter(lambda: [*islice(texts, CAPTIONS_AT_ONCE)], []):
            yield from map_concurrently(conversation, block)

    def _conversation(self, bad: BadFiles, text: str | None) -> Conversation:
        if text is not None:
            with bad.collecting():
                return conversation_of(
                    read_caption(f"caption {text}", partial(self.read, text, self.locate(text).place))
                )
        return []


def caption_of(image: str) -> str:
    return image.removesuffix(suffix_of(image)) + CAPTION
