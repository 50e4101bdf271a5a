"""A source's images: in a folder, or in a zip or tar that is read in place and never unpacked; here or at a URL."""

import errno
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

from cache_store.errors import MissingPathError, NotAFileError, SourceError, TooLargeError
from cache_store.format.layout import SPEC_FILE, TEXTS_FILE
from cache_store.storage.claim import CLAIM_FILE
from cache_store.storage.local import LocalFile, LocalStore
from cache_store.storage.prefetch import AnnouncedResults
from cache_store.storage.protocol import File
from cache_store.storage.store import Store, is_url, open_store, split_url, with_listing
from precompute.images.not_images import HEAD_BYTES, PACKED, name_by_magic
from precompute.images.rejected import Rejected
from precompute.sources.archives.tar import ImageTar, is_tar
from precompute.sources.archives.zip import ImageZip
from precompute.sources.images import ImageStore
from precompute.sources.listing import CACHE, LINKED, NOT_UTF8, Listing, as_posix, is_mac_metadata, is_utf8
from precompute.sources.place import (
    HEADER_BYTES,
    MAX_FILE_BYTES,
    MISSING,
    NOWHERE,
    Located,
    PartStream,
    Place,
    refuse_large,
)

MAX_PATH = 4_000
"""Nearly Linux's bound on a path; stores refuse longer names in their own ways."""

CACHE_FILES = (SPEC_FILE, TEXTS_FILE)
"""A folder that has both files is a cache."""

MISSING_ERRORS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG}
)
"""A local disk's errors that mean a missing file. Others, of a failing disk or mount, stop the build."""

T = TypeVar("T")


class ImageFolder(ImageStore):
    """Images in a folder of any store; names are relative to it and cannot leave it.

    Links are the owner's choice and are followed, but linked folders are not listed. A remote store is listed once;
    each image is then one request, made ahead if the image is expected.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._known = store, with_listing(store)
        self._ahead, self.fetches_ahead = AnnouncedResults(self._read), store.is_remote

    def read(self, name: str, place: Place | None = None) -> bytes:
        return self._ahead.get(name) if self.fetches_ahead else self._read(name)

    def expect(self, names: Iterable[str]) -> None:
        if self.fetches_ahead:
            self._ahead.expect(names)

    def read_head(self, name: str, place: Place | None = None) -> bytes:
        return self._reading(name, lambda there: self._store.open(there).part(0, HEADER_BYTES))

    def open(self, name: str, place: Place | None = None) -> BinaryIO:
        file = self._reading(name, self._store.open)
        return PartStream(file, 0, file.version.size)

    def listing(self) -> Listing:
        names, skipped = list[str](), Counter[str]()
        for name, _ in self._known.walk():
            if name.endswith("/"):
                skipped[LINKED] += 1
            elif not is_utf8(name):
                skipped[NOT_UTF8] += 1
            elif not is_mac_metadata(name) and not name.endswith(CLAIM_FILE):
                names.append(name)
        marked = ({name.removesuffix(mark) for name in names if name.endswith(mark)} for mark in CACHE_FILES)
        if caches := {each for each in set.intersection(*marked) if each.endswith("/") or not each}:
            skipped[CACHE] = len(caches)
            names = [name for name in names if not name.startswith(tuple(caches))]
        return Listing(dict.fromkeys(sorted(names)), skipped)

    def version(self) -> None:
        """Only a look at each file shows changes."""

    def locate(self, name: str) -> Located:
        try:
            return Located(str(self._reading(name, self._known.stat)))
        except Rejected:
            return NOWHERE

    def _read(self, name: str) -> bytes:
        return self._reading(name, lambda there: self._store.read(there, MAX_FILE_BYTES))

    def _reading(self, name: str, read: Callable[[str], T]) -> T:
        if is_unsafe(name):
            raise Rejected(MISSING, f"{name!r} is not a name inside the image folder")
        try:
            return read(as_posix(name))
        except TooLargeError as error:
            refuse_large(name, error.size)
            raise
        except NotAFileError:  # reading a pipe or device could hang
            raise Rejected(MISSING, f"{name} is not a file") from None
        except OSError as error:
            is_denied = not self._store.is_remote and error.errno in MISSING_ERRORS  # no refused credentials of a store
            if not isinstance(error, FileNotFoundError) and not is_denied:
                raise
            raise Rejected(MISSING, f"{name}: {error.strerror}") from None


def is_unsafe(name: str) -> bool:
    return not name or name[0] == "/" or ".." in name.split("/") or "\0" in name or len(name) > MAX_PATH


def open_images(address: str, field: str) -> ImageStore:
    """Open images in a folder, a zip or a tar, here or at a URL; raise MissingPathError if there is nothing."""
    try:
        if is_url(address):
            if file := find_file(address):
                return open_archive(file)
            if holds_files(store := open_store(address)):
                return ImageFolder(store)
        elif (path := Path(address).expanduser()).exists():
            return open_image_store(path)
    except SourceError as error:
        raise SourceError(f"source.{field}: {error}") from None
    raise MissingPathError(f"source.{field}: {address} does not exist")


def find_file(url: str) -> File | None:
    folder, name = split_url(url)
    try:
        return open_store(folder).open(name) if name else None
    except FileNotFoundError:
        return None


def holds_files(store: Store) -> bool:
    try:
        return next(iter(store.walk()), None) is not None
    except FileNotFoundError:
        return False


def open_image_store(path: Path) -> ImageStore:
    if path.is_dir():
        return ImageFolder(LocalStore(path))
    if not path.is_file():
        raise SourceError(f"{path} is neither a folder nor a file; expected a folder, a zip or a tar of images")
    return open_archive(LocalFile(path))


def open_archive(file: File) -> ImageTar | ImageZip:
    head = file.part(0, HEAD_BYTES)
    if packed := name_by_magic(head, PACKED):
        raise SourceError(f"{file} is packed by {packed}, so it cannot be read in place; unpack it")
    return (ImageTar if is_tar(str(file), head) else ImageZip)(file)
