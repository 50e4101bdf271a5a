"""Opens the source of a build's samples: a list, a folder, tars, Parquet files or another cache."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from cache_store.cache.metadata import has_cache, read_build, refuse_no_cache
from cache_store.errors import CacheError, ConfigError, MissingPathError, NotAFileError
from cache_store.format.layout import BUILD_FILE
from cache_store.format.record import describe_mismatch
from cache_store.log import log_info
from cache_store.storage.local import LocalStore
from cache_store.storage.protocol import File
from cache_store.storage.store import Store, is_url, open_store, split_url
from precompute.sources.cache import CacheSource
from precompute.sources.config import Kind, SourceConfig
from precompute.sources.folder import FolderSource
from precompute.sources.image_store import ImageFolder, holds_files, open_images
from precompute.sources.images import Source
from precompute.sources.listing import suffix_of
from precompute.sources.lists import ListSource, LlavaSource, TableSource
from precompute.sources.media import IMAGES, VIDEOS, Media
from precompute.sources.parquet import SUFFIX as PARQUET
from precompute.sources.parquet import ParquetSource
from precompute.sources.source_files import find_files
from precompute.sources.webdataset import SUFFIX as TAR
from precompute.sources.webdataset import WebDatasetSource

T = TypeVar("T")

BY_SUFFIX: dict[str, Kind] = {
    ".csv": "table",
    ".json": "llava",
    ".zip": "folder",
    TAR: "webdataset",
    PARQUET: "parquet",
}

FILES_SEEN = 1_000

MAX_LINE = 2**20


def recognised(config: SourceConfig) -> SourceConfig:
    if config.kind != "auto":
        return config
    kind = BY_SUFFIX.get(suffix_of(config.path).lower()) or kind_of_content(config.path)
    log_info(f"source.path {config.path} is read as source.kind {kind}; name another kind if it is one")
    return replace(config, kind=kind)


def kind_of_content(path: str) -> Kind:
    """Return the kind of a list by its first record, that of a folder by its first files."""
    if suffix_of(path).lower() == ".jsonl":
        return "llava" if b'"conversations"' in open_list(*store_of(path)).readline(MAX_LINE) else "table"
    if not is_url(path) and not require_path(path).is_dir():
        raise ConfigError(f"source.path: {path} is of no known kind by its name; name it with source.kind")
    store = open_store(path)
    if has_cache(store):
        return "cache"
    names = [name for name, _ in islice(store.walk(), FILES_SEEN)]
    found = {suffix_of(name).lower() for name in names}
    if any(map(IMAGES.includes, names)) or any(map(VIDEOS.includes, names)):
        return "folder"
    return "webdataset" if TAR in found else "parquet" if PARQUET in found else "folder"  # tars may have tables beside


def open_source(config: SourceConfig, media: Media = IMAGES) -> Source:
    return OPENERS[config.kind](config, media)


def open_listed(kind: type[ListSource], config: SourceConfig, media: Media) -> Source:
    images = open_images(config.images, "images") if config.images else None
    store, name = store_of(config.path)
    open_list(store, name)  # report a missing list before a model is loaded
    return kind(partial(open_list, store, name), images or ImageFolder(store), config.fields, media)


def store_of(path: str) -> tuple[Store, str]:
    if is_url(path):
        folder, name = split_url(path)
        return open_store(folder), name
    return LocalStore((file := require_path(path)).parent), file.name


def open_list(store: Store, name: str) -> File:
    try:
        return store.open(name)
    except FileNotFoundError:
        holds_files(store)  # a listing reports a missing bucket; a file request does not
        raise MissingPathError(f"source.path: {store.where(name)} does not exist") from None
    except NotAFileError as error:
        raise ConfigError(f"source.path: {error}; kind folder reads a tree") from None


def open_cache_source(config: SourceConfig, media: Media) -> Source:
    refuse_no_cache(store := open_store(config.path if is_url(config.path) else require_path(config.path)))
    recorded = recorded_section(store, "source", SourceConfig)
    if (column := config.fields.image) is not None:
        if recorded.kind != "parquet":
            raise ConfigError(
                f"source.fields.image: {store} was made from kind {recorded.kind}; only parquet has others"
            )
        recorded = replace(recorded, fields=replace(recorded.fields, image=column))
    return CacheSource(store, open_source(recorded, media))


OPENERS: dict[str, Callable[[SourceConfig, Media], Source]] = {
    "llava": partial(open_listed, LlavaSource),
    "table": partial(open_listed, TableSource),
    "folder": lambda config, media: FolderSource(open_images(config.path, "path"), media),
    "webdataset": lambda config, media: WebDatasetSource(find_files(config.path, TAR), config.fields, media),
    "parquet": lambda config, media: ParquetSource(find_files(config.path, PARQUET), config.fields, media),
    "cache": open_cache_source,
}


def recorded_section(store: Store, section: str, kind: type[T]) -> T:
    """Read a section of a cache's build.json; raise CacheError for fields, types or values unknown to this version."""
    values = read_build(store).config.get(section, {})
    try:
        made = msgspec.convert(values, kind, strict=True)
        problem = ", ".join(sorted(values.keys() - kind.__annotations__.keys()))
    except (msgspec.ValidationError, ConfigError) as error:
        problem = describe_mismatch(error) if isinstance(error, msgspec.ValidationError) else str(error)
    if problem:
        raise CacheError(f"{store.where(BUILD_FILE)} cannot be read by this version: {section}: {problem}")
    return made


def require_path(value: str) -> Path:
    path = Path(value).expanduser()
    if not path.exists():
        raise MissingPathError(f"source.path: {path} does not exist")
    return path
