"""Open the store of an address: a folder, or a URL. What a store is stands in `verbs.py`."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from cache_store.errors import ConfigError
from cache_store.storage.callers import in_flight
from cache_store.storage.forked import ForkedStore
from cache_store.storage.hub import HUB, HubStore
from cache_store.storage.kept import KeptBlocks, KeptStore
from cache_store.storage.local import LocalStore
from cache_store.storage.objects import SCHEMES, ObjectStore
from cache_store.storage.remote import listed_once
from cache_store.storage.retrying import RetryingStore
from cache_store.storage.verbs import Draft, Store

__all__ = ["Draft", "Store", "listed_once"]
"""Other rooms find them here, too."""

URL = re.compile(r"[a-z][a-z0-9+.-]*:/", re.IGNORECASE)
"""The beginning of a URL; a Path turns its two slashes into one."""

T = TypeVar("T")
R = TypeVar("R")

Address = str | Path | Store
"""A cache as a person names it, or its store."""


def open_objects(scheme: str, place: str) -> Store:
    return ForkedStore(RetryingStore(ObjectStore.in_bucket(scheme, place)))


def open_hub(scheme: str, place: str) -> Store:
    return RetryingStore(HubStore.in_bucket(scheme, place))


STORES: dict[str, Callable[[str], Store]] = {scheme: partial(open_objects, scheme) for scheme in SCHEMES}
STORES[HUB] = partial(open_hub, HUB)
"""Functions that open the `place` of `scheme://place`, by scheme; an address without a scheme is a folder."""


def open_store(address: Address) -> Store:
    """Open a store, whether there is anything or not; ConfigError for an address of an unknown kind."""
    if not isinstance(address, str | Path):
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


def kept(store: Store, folder: Path, max_bytes: int) -> Store:
    """Return a remote store with a local folder that keeps blocks of files whose SHA-256 is known."""
    return KeptStore(store, KeptBlocks(folder, max_bytes)) if store.is_remote else store


def wait_together(store: Store, call: Callable[[T], R], each: Sequence[T]) -> Sequence[R]:
    """Run `call` for each item and return the results in order; remote stores run many at a time."""
    return in_flight(call, each) if store.is_remote else [*map(call, each)]


def is_url(address: Address) -> bool:
    """Whether the address is a URL rather than a local path."""
    return "://" in str(address)


def split_url(url: str) -> tuple[str, str]:
    """Return the URL of the folder that a file is in, and its name; no name where the URL is that of a bucket."""
    scheme, _, place = url.partition("://")
    folder, _, name = place.rstrip("/").rpartition("/")
    return (f"{scheme}://{folder}", name) if folder else (url, "")


def local_path(option: str, given: str | Path) -> Path:
    """Return a path on this machine, `~` replaced; ConfigError, naming the option, for a URL."""
    if URL.match(str(given)):
        raise ConfigError(f"{option}: {given} is a URL; name a path on this machine")
    return Path(given).expanduser()
