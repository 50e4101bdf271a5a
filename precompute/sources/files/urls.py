"""Which URLs a source may have, and what reads each."""

from collections.abc import Callable

from cache_store.errors import ConfigError
from cache_store.storage.objects.client import SCHEMES
from precompute.sources.files.hub import HUB, HubFolder
from precompute.sources.files.objects import ObjectFolder
from precompute.sources.files.remote import RemoteFile, RemoteFolder

FOLDERS: dict[str, Callable[[str, str], RemoteFolder]] = {
    **dict.fromkeys(SCHEMES, ObjectFolder.in_bucket),
    HUB: HubFolder.in_bucket,
}
"""By the scheme of a URL, for it and the rest."""


def open_folder(url: str) -> RemoteFolder:
    """The names below a URL, whether there are any or not; ConfigError for a URL of another kind."""
    scheme, _, place = url.partition("://")
    if scheme not in FOLDERS:
        known = ", ".join(f"{each}://" for each in FOLDERS)
        raise ConfigError(f"{url} is a URL of a kind that is not read; name a file or a folder, or one of {known}")
    return FOLDERS[scheme](scheme, place)


def split_url(url: str) -> tuple[str, str]:
    """The URL of the folder that a file lies in, and its name; no name where the URL is that of a bucket."""
    scheme, _, place = url.partition("://")
    folder, _, name = place.rstrip("/").rpartition("/")
    return (f"{scheme}://{folder}", name) if folder else (url, "")


def find_file(url: str) -> RemoteFile | None:
    """None where there is no file of this very URL."""
    folder, name = split_url(url)
    try:
        return RemoteFile(open_folder(folder), name) if name else None
    except FileNotFoundError:
        return None


def is_folder(url: str) -> bool:
    """Whether there is any file below a URL."""
    try:
        return next(open_folder(url).files(), None) is not None
    except FileNotFoundError:
        return False
