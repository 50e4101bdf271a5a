"""Where samples come from; a new kind of source is a class with these three methods and a line in SOURCES."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from cache_store.errors import ConfigError, MissingPathError
from precompute.sources.folder import FolderSource
from precompute.sources.listing import Samples
from precompute.sources.llava import LlavaSource


class Source(Protocol):
    def samples(self) -> Samples:
        """Every sample, and what was passed over."""

    def fingerprint(self, uri: str) -> str:
        """What changes when an image changes, known without reading it."""

    def read(self, uri: str) -> bytes:
        """An image file's bytes; Rejected where there are none. Called from several threads."""


SOURCES: dict[str, Callable[[Path, Path | None], Source]] = {"llava": LlavaSource, "folder": FolderSource}


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where the images and their texts are."""

    kind: Literal["llava", "folder"]
    """llava: a chat.json of id, image, conversations. folder: a tree of images, captions in name.txt beside them."""
    path: str
    """llava: the chat.json. folder: the folder, or a zip or an uncompressed tar of one."""
    images: str | None = None
    """llava: a folder, or a zip or uncompressed tar that is read in place; by default the folder of the chat.json."""

    def __post_init__(self) -> None:
        if self.kind == "folder" and self.images is not None:
            raise ConfigError("source.images is for kind llava; of kind folder, source.path is the image tree")


def open_source(config: SourceConfig) -> Source:
    images = existing("images", config.images) if config.images else None
    return SOURCES[config.kind](existing("path", config.path), images)


def existing(field: str, value: str) -> Path:
    path = Path(value).expanduser()
    if not path.exists():
        raise MissingPathError(f"source.{field}: {path} does not exist")
    return path
