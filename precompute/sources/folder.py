"""A tree of images or videos in a folder, a zip or a tar; `name.txt` beside `name.jpg` is its caption."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

from cache_store.storage.threads import map_concurrently
from precompute.sources.fields import Conversation, as_caption, conversation_of, read_text
from precompute.sources.images import ALL, ImagesOf, ImageStore, Names, Source
from precompute.sources.listing import MASK, BadFiles, Listing, Samples, counted_suffix, is_mask, suffix_of
from precompute.sources.media import IMAGES, Media

CAPTION = ".txt"

CAPTIONS_AT_ONCE = 1_024
"""Captions in memory; many are read at the same time."""


class FolderSource(ImagesOf, Source):
    """The files found of one kind of media are the samples; a sample's id is its name in the tree."""

    def __init__(self, images: ImageStore, media: Media = IMAGES) -> None:
        super().__init__(images)
        self._tree, self._media = images, media

    def version(self, part: Names = ALL) -> str | None:
        return self._tree.version()

    @cached_property
    def _listing(self) -> Listing:
        return self._tree.listing()

    def parts(self, rows: int) -> Sequence[Names]:
        """Return ranges of names; all videos are listed together, because one may have many clips."""
        names = [*filter(self._is_sample, self._listing.names)] if self._media is IMAGES else []
        firsts = ["", *names[rows::rows]]
        return [*zip(firsts, [*firsts[1:], ""], strict=True)] if len(firsts) > 1 else [ALL]

    def list_version(self) -> str:
        names = "\0".join(self._listing.names)
        return self.version() or hashlib.sha256(names.encode()).hexdigest()

    def samples(self, part: Names = ALL) -> Samples:
        names, includes = self._listing.names, self._media.includes
        first, stop = part or ("", "")
        own = [name for name in names if first <= name and (not stop or name < stop)]
        captions = {text for name in names if includes(name) and (text := caption_of(name)) in names}
        skipped = Counter(self._listing.skipped if not first else ())  # once, not for each part
        skipped.update(counted_suffix(name) for name in own if not includes(name) and name not in captions)
        if masks := sum(includes(name) and is_mask(name) for name in own):
            skipped[MASK] = masks
        return Samples(self._samples([*filter(self._is_sample, own)]), skipped, media=self._media.name)

    def _is_sample(self, name: str) -> bool:
        return self._media.includes(name) and not is_mask(name)

    def _samples(self, samples: Sequence[str]) -> Iterator[dict[str, object]]:
        bad, names = BadFiles(), self._listing.names
        for first in range(0, len(samples), CAPTIONS_AT_ONCE):
            block = samples[first : first + CAPTIONS_AT_ONCE]
            texts = [text if (text := caption_of(name)) in names else None for name in block]
            conversations = map_concurrently(partial(self._conversation, bad), texts)
            for name, turns in zip(block, conversations, strict=True):
                yield {"id": name, "uri": name, "conversations": turns, **self.locate(name).columns()}
        bad.refuse()

    def _conversation(self, bad: BadFiles, text: str | None) -> Conversation:
        if text is not None:
            with bad.collecting():
                read = partial(self.read, text, self.locate(text).place)
                return conversation_of(as_caption(read_text(f"caption {text}", read)))
        return []


def caption_of(image: str) -> str:
    return image.removesuffix(suffix_of(image)) + CAPTION
