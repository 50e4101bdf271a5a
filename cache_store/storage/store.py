"""Open the store at an address, a folder or a URL; `protocol.py` defines stores."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from cache_store.errors import ConfigError
from cache_store.storage.hub import HUB, HubStore
from cache_store.storage.kept_blocks import KeptStore
from cache_store.storage.local import LocalStore
from cache_store.storage.objects import SCHEMES, ObjectStore
from cache_store.storage.protocol import Draft, Store
from cache_store.storage.threads import map_concurrently
from cache_store.storage.wrapped import ListedStore

__all__ = ["Draft", "Store"]
"""Imported from here by other packages."""

URL = re.compile(r"[a-z][a-z0-9+.-]*:/", re.IGNORECASE)
"""The beginning of a URL; a Path turns its two slashes into one."""

T = TypeVar("T")
R = TypeVar("R")

Address = str | Path | Store
"""A cache's path or URL, or its store."""


STORES: dict[str, Callable[[str], Store]] = {scheme: partial(ObjectStore.in_bucket, scheme) for scheme in SCHEMES}
STORES[HUB] = partial(HubStore.in_bucket, HUB)
"""Functions that open the `place` of `scheme://place`, by scheme; an address without a scheme is a folder."""


def open_store(address: Address) -> Store:
    """Open a store, which may be empty; ConfigError for an address of an unknown kind."""
    if not isinstance(address, str | Path):
        if not hasattr(address, "put_whole"):
            raise ConfigError(f"expected the folder or the URL of a cache, got {address!r}")
        return address
    scheme, is_url, place = str(address).partition("://")
    if not is_url:
        if scheme.startswith(tuple(f"{each}:/" for each in STORES)):
            raise ConfigError(f"{address} has one slash too few; a URL is {scheme.partition(':')[0]}://BUCKET/FOLDER")
        return LocalStore(Path(address).expanduser())
    if scheme not in STORES:
        known = ", ".join(f"{each}://" for each in STORES)
        raise ConfigError(f"{address} has an unsupported scheme; name a folder, or one of {known}")
    return STORES[scheme](place)


def with_kept_blocks(store: Store, folder: Path, max_bytes: int) -> Store:
    """Keep blocks of a remote store's files with a known SHA-256 in a local folder."""
    return KeptStore(store, folder, max_bytes) if store.is_remote else store


def with_listing(store: Store) -> Store:
    """List a remote store once, for looks at many of its files."""
    return ListedStore(store) if store.is_remote else store


def map_calls(store: Store, call: Callable[[T], R], items: Sequence[T]) -> Sequence[R]:
    """Call `call` for each item and return the results in order; for a remote store, many at a time."""
    return map_concurrently(call, items) if store.is_remote else [*map(call, items)]


def is_url(address: Address) -> bool:
    return "://" in str(address)


def split_url(url: str) -> tuple[str, str]:
    scheme, _, place = url.partition("://")
    folder, _, name = place.rstrip("/").rpartition("/")
    return (f"{scheme}://{folder}", name) if folder else (url, "")


def local_path(option: str, given: str | Path) -> Path:
    if not isinstance(given, str | Path):
        raise ConfigError(f"{option}: expected a path, got {given!r}")
    if URL.match(str(given)):
        raise ConfigError(f"{option}: {given} is a URL; name a path on this machine")
    return Path(given).expanduser()
