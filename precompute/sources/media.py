"""The kinds of files that a source lists: images, or videos.

The suffix only selects files; their content decides how they are read.
"""

from dataclasses import dataclass

from precompute.clips import opened as clips
from precompute.images import decode as images
from precompute.sources.listing import suffix_of


@dataclass(frozen=True, kw_only=True)
class Media:
    name: str
    """In messages: image or video."""
    suffixes: frozenset[str]
    columns: tuple[str, ...]
    """Usual names of the field of a table or record that has the file, or its name."""

    def includes(self, name: str) -> bool:
        return suffix_of(name).lower() in self.suffixes


IMAGES = Media(name="image", suffixes=images.SUFFIXES, columns=("image", "img", "jpg", "jpeg", "png", "webp"))

VIDEOS = Media(
    name="video",
    suffixes=clips.SUFFIXES,
    columns=("video", "mp4", "mov", "mkv", "webm", "avi"),
)
