"""Images at a URL: files below it, or a zip or tar there that is read in place."""

import threading
from pathlib import Path, PurePosixPath

from cache_store.errors import MissingPathError
from cache_store.storage.store import is_url
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import MISSING, is_mac_metadata, refuse_large
from precompute.sources.archives.expected import ExpectedReads
from precompute.sources.archives.image_store import CACHE_FILES, ImageStore, is_unsafe, open_archive, open_image_store
from precompute.sources.archives.listing import Listing
from precompute.sources.archives.names import Names
from precompute.sources.files.file import Version
from precompute.sources.files.remote import PART_BYTES, RemoteFile, RemoteFolder
from precompute.sources.files.urls import find_file, is_folder, open_folder


class RemoteImages:
    """Images below a URL. To plan them, all are listed, once; each is a request, made ahead for those expected."""

    def __init__(self, folder: RemoteFolder) -> None:
        self._folder = folder
        self._versions: dict[str, Version] | None = None
        self._listing = threading.Lock()
        self._gone = set[str]()
        """Names that were not there when they were to be read, whatever the list says."""
        reads = ExpectedReads(self._read)
        self.expect, self.read = reads.expect, reads.read

    def listing(self) -> Listing:
        """All files except those of caches."""
        names = sorted(name for name in self._listed() if not is_mac_metadata(name))
        inside: dict[str, set[str]] = {}
        for path in map(PurePosixPath, names):
            if path.name in CACHE_FILES:
                inside.setdefault(str(path.parent), set()).add(path.name)
        caches = sorted(folder for folder, found in inside.items() if found == CACHE_FILES)
        if caches:
            names = [name for name in names if not any(PurePosixPath(name).is_relative_to(each) for each in caches)]
        return Listing(names=Names(names), not_utf8=[], linked_folders=[], caches=caches)

    def _listed(self) -> dict[str, Version]:
        with self._listing:
            if self._versions is None:
                self._versions = dict(self._folder.files())
            return self._versions

    def version(self) -> None:
        """Only each file tells whether it is as it was."""

    def fingerprint(self, name: str) -> str:
        version = None if name in self._gone else self._listed().get(PurePosixPath(name).as_posix())
        return MISSING if version is None else str(version)

    def _read(self, name: str) -> bytes:
        if is_unsafe(name):
            raise Rejected(MISSING, f"{name!r} is not a name inside the image folder")
        try:
            data, version = self._folder.beginning(path := PurePosixPath(name).as_posix(), PART_BYTES)
        except FileNotFoundError as error:
            self._gone.add(name)
            raise Rejected(MISSING, f"{name}: {error.strerror}") from None
        refuse_large(name, version.size)
        return data if len(data) == version.size else RemoteFile(self._folder, path, version).part(0, version.size)


def open_images(address: str, field: str) -> ImageStore:
    """Images in a folder, a zip or a tar, here or at a URL; MissingPathError, naming the field, where nothing is."""
    if not is_url(address):
        if not (path := Path(address).expanduser()).exists():
            raise MissingPathError(f"source.{field}: {path} does not exist")
        return open_image_store(path)
    if file := find_file(address):
        return open_archive(file)
    if not is_folder(address):
        raise MissingPathError(f"source.{field}: {address} does not exist")
    return RemoteImages(open_folder(address))
