"""Where samples come from."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec

from cache_store.cache.metadata import read_build, refuse_no_cache
from cache_store.errors import CacheError, ConfigError, MissingPathError, NotAFileError, SourceError
from cache_store.format.layout import BUILD_FILE
from cache_store.format.record import describe_mismatch
from cache_store.storage.local import LocalStore
from cache_store.storage.store import Store, is_url, open_store, split_url
from cache_store.storage.verbs import File
from precompute.sources.archives.image_store import ImageFolder, Images, holds_files, open_images
from precompute.sources.archives.names import Samples
from precompute.sources.cache import CacheSource
from precompute.sources.fields import FieldNames
from precompute.sources.folder import FolderSource
from precompute.sources.llava import LlavaSource
from precompute.sources.parquet import SUFFIX as PARQUET
from precompute.sources.parquet import ParquetSource
from precompute.sources.source_files import find_files
from precompute.sources.webdataset import SUFFIX as TAR
from precompute.sources.webdataset import WebDatasetSource

T = TypeVar("T")


WHERE_IMAGES_ARE = {
    "folder": "source.path is the image tree",
    "webdataset": "the tars hold their images",
    "parquet": "the rows hold their images",
    "cache": "the other cache remembers its images",
}

WHERE_TEXTS_ARE = {
    "llava": "Give each record an answer in its conversations",
    "folder": "Put each caption beside its image, as name.txt",
    "webdataset": "Put a .txt, or a .json with caption, beside each image",
    "parquet": "Name the column with source.fields.caption, or source.fields.conversations",
    "cache": "That cache's samples were planned without texts; plan another from a source that has them",
}

USED_FIELDS = {"webdataset": {"image"}, "parquet": {"image", "id", "caption", "conversations"}}
"""Of FieldNames."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where the images and their texts are."""

    kind: Literal["llava", "folder", "webdataset", "parquet", "cache"]
    """llava: a chat.json of id, image, conversations, or JSON Lines of such. folder: a tree of images, captions in
    name.txt beside them. webdataset: img2dataset's tars, of images with a .txt or .json each. parquet: rows of images
    with texts, as Hugging Face datasets writes them. cache: the samples of another cache, in its rows, so that both can
    be read together."""
    path: str
    """llava: the chat.json. folder: the folder, or a zip or an uncompressed tar of one. webdataset, parquet: a file,
    a folder of them, or a pattern: 'shards/{00000..00099}.tar', 'data/train-*.parquet'. cache: the other cache. Each
    may be at a URL: s3://BUCKET/…, gs://…, az://…, hf://datasets/OWNER/NAME/…, and is read there in place."""
    images: str | None = None
    """llava: a folder, or a zip or uncompressed tar that is read in place, here or at such a URL; by default the folder
    of the chat.json."""

    text: Literal["caption"] | None = None
    """For a text encoder: which text of a sample it reads. caption is the caption, or the first answer of a
    conversation; a sample without one is rejected."""

    fields: FieldNames = field(default_factory=FieldNames)

    def __post_init__(self) -> None:
        if self.kind != "llava" and self.images is not None:
            raise ConfigError(f"source.images is for kind llava; of kind {self.kind}, {WHERE_IMAGES_ARE[self.kind]}")
        unused = {name for name, value in asdict(self.fields).items() if value} - USED_FIELDS.get(self.kind, set())
        if unused:
            raise ConfigError(f"source.fields.{min(unused)} says nothing of kind {self.kind}; leave it out")


class Source(Images, Protocol):
    """Samples, and their images by uri; a new kind is such a class and a line in SOURCES."""

    def samples(self) -> Samples:
        """List every sample, and what was passed over."""

    def version(self) -> str | None:
        """Return what changes when anything that it lists is written, added or taken away, without reading it; None
        where each image would have to be looked at.
        """


def open_source(config: SourceConfig) -> Source:
    """The source that a config names; MissingPathError, SourceError or CacheError where it is not there."""
    return SOURCES[config.kind](config)


def open_llava(config: SourceConfig) -> Source:
    images = open_images(config.images, "images") if config.images else None
    if is_url(config.path):
        folder, name = split_url(config.path)
        store = open_store(folder)
    else:
        if (path := existing("path", config.path)).is_dir():
            raise ConfigError(f"source.path: {path} is a folder; kind llava reads a list, kind folder a tree of images")
        store, name = LocalStore(path.parent), path.name
    open_list(store, name)  # that there is none is said before a model is loaded
    return LlavaSource(partial(open_list, store, name), images or ImageFolder(store))


def open_list(store: Store, name: str) -> File:
    try:
        return store.open(name)
    except FileNotFoundError:
        holds_files(store)  # a listing says that there is no bucket, which no answer of a file does
        raise MissingPathError(f"source.path: {store.where(name)} does not exist") from None
    except NotAFileError as error:
        raise SourceError(f"source.path: {error}") from None
    except OSError as error:
        raise SourceError(f"source.path: {store.where(name)}: {error.strerror}") from None


def open_tree(config: SourceConfig) -> Source:
    return FolderSource(open_images(config.path, "path"), are_far=is_url(config.path))


def open_webdataset(config: SourceConfig) -> Source:
    return WebDatasetSource(find_files(config.path, TAR), config.fields)


def open_parquet(config: SourceConfig) -> Source:
    return ParquetSource(find_files(config.path, PARQUET), config.fields)


def open_cache_source(config: SourceConfig) -> Source:
    refuse_no_cache(store := open_store(config.path if is_url(config.path) else existing("path", config.path)))
    return CacheSource(store, open_source(recorded_section(store, "source", SourceConfig)))


SOURCES: dict[str, Callable[[SourceConfig], Source]] = {
    "llava": open_llava,
    "folder": open_tree,
    "webdataset": open_webdataset,
    "parquet": open_parquet,
    "cache": open_cache_source,
}


def recorded_section(store: Store, section: str, kind: type[T]) -> T:
    """A section of a cache's build.json; CacheError for fields, types or values that this version has not."""
    config = read_build(store).config
    try:
        made = msgspec.convert(config[section], kind, strict=True)
        problem = ", ".join(sorted(config[section].keys() - kind.__annotations__.keys()))
    except (KeyError, msgspec.ValidationError, ConfigError) as error:
        problem = describe_mismatch(error) if isinstance(error, msgspec.ValidationError) else str(error)
    if problem:
        raise CacheError(f"{store.where(BUILD_FILE)} holds no config of this version: {section}: {problem}")
    return made


def existing(field: str, value: str) -> Path:
    path = Path(value).expanduser()
    if not path.exists():
        raise MissingPathError(f"source.{field}: {path} does not exist")
    return path
