"""The kinds of files that a source lists, images or videos, and the refusal of a source whose samples lack them.

The suffix only selects files; their content decides how they are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cache_store.errors import SourceError
from cache_store.messages import abridge
from cache_store.storage.store import is_url, split_url
from precompute.clips import opened as clips
from precompute.images import decode as images
from precompute.images.rejected import CONTINUE
from precompute.sources.config import SOURCES, SourceConfig
from precompute.sources.listing import suffix_of

Bare = tuple[str, str]
"""Id and uri of a sample that has no image or no text."""


@dataclass(frozen=True, kw_only=True)
class Media:
    name: str
    suffixes: frozenset[str]
    columns: tuple[str, ...]
    """Usual names of the field of a table or record that has the file, or its name."""

    def includes(self, name: str) -> bool:
        return suffix_of(name).lower() in self.suffixes


IMAGES = Media(name="image", suffixes=images.SUFFIXES, columns=("image", "img", "jpg", "jpeg", "png", "webp"))

VIDEOS = Media(name="video", suffixes=clips.SUFFIXES, columns=("video", "mp4", "mov", "mkv", "webm", "avi"))


def refuse_missing(bare: Sequence[Bare], rows: int, source: SourceConfig, media: Media, allowed: float) -> NoReturn:
    """Raise SourceError: more than the fraction `allowed` of all samples lack their image or text."""
    kind, path = SOURCES[source.kind], source.images or source.path
    lacking, names = f"their {media.name}", [uri or name for name, uri in bare]
    if source.text:
        lacking, names, advice = f"a {source.text}", [name for name, _ in bare], kind.add_texts
    elif not any(uri for _, uri in bare):
        advice = f"Leave records of text only out of {source.path}"
    elif kind.images_are:
        advice = f"Mend {path}"
    else:
        folder = source.images or (split_url(path)[0] if is_url(path) else Path(path).parent.resolve())
        advice = f"They are looked for in {folder}: set source.images to where they are, or mend the list"
    raise SourceError(
        f"{len(bare)} of {rows} samples without {lacking}: {abridge(names)}. That is more than run.max_reject_fraction "
        f"{allowed:g} allows; nothing was encoded. {advice}; {CONTINUE}"
    )
