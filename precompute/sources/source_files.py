"""Files that `source.path` names: one, all of a folder, or those of a pattern such as `shards/{00000..00099}.tar`."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from glob import has_magic
from itertools import islice
from pathlib import Path

from cache_store.errors import ConfigError, MissingPathError, NotAFileError
from cache_store.storage.local import LocalStore
from cache_store.storage.store import Store, is_url, map_calls, open_store, split_url, with_listing
from cache_store.storage.verbs import File, Version, changed_error
from precompute.sources.archives.archive import is_mac_metadata
from precompute.sources.archives.image_store import ImageFolder, find_file, holds_files
from precompute.sources.archives.names import Listing, no_listing

BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{},]*(?:,[^{},]*)+))\}")
"""`{00..12}` or `{a,b}`, with no other braces in it."""

MAX_FILES = 1_000_000

ASKED_AT_ONCE = 256


@dataclass(frozen=True)
class SourceFiles:
    """Files of a store, each in the version in which it was first seen."""

    store: Store
    """The folder, or that of the file, or the one before the first part of the pattern that is no name."""
    names: list[str]
    """In order, relative to it: so a name stays the same when other files are added."""
    listing: Listing = field(default_factory=no_listing)
    """What else a folder holds."""
    _versions: dict[str, Version] = field(default_factory=dict, repr=False)

    def where(self, name: str) -> str:
        return self.store.where(name)

    def open(self, name: str) -> File:
        """Open a file as it was the first time; FileNotFoundError where it is gone, a ChangedError once it is read."""
        file = self.store.open(name, self._versions.get(name))
        self._versions.setdefault(name, file.version)
        return file

    def version(self) -> str | None:
        """Return a digest of the names and stamps of all; None where one is gone: listing names it."""
        digest, names = hashlib.sha256(), iter(self.names)
        try:
            for some in iter(lambda: [*islice(names, ASKED_AT_ONCE)], []):
                stamps = map_calls(self.store, self._stamp, some)
                digest.update(ascii([*zip(some, stamps, strict=True)]).encode())
        except FileNotFoundError:
            return None
        return digest.hexdigest()

    def _stamp(self, name: str) -> str:
        version = self.store.stat(name)
        if self._versions.setdefault(name, version) != version:
            raise changed_error(self.where(name))
        return version.stamp


def find_files(pattern: str, suffix: str) -> SourceFiles:
    """Find the files; MissingPathError where there are none, or where one that is named is not there."""
    files = url_files(pattern, suffix) if is_url(pattern) else local_files(Path(pattern).expanduser(), suffix)
    if not files.names:
        raise MissingPathError(f"source.path: {pattern} holds no {suffix} file")
    return files


def local_files(path: Path, suffix: str) -> SourceFiles:
    if path.is_dir():
        return all_files(LocalStore(path), suffix)
    if path.exists():
        return SourceFiles(LocalStore(path.parent), [path.name])
    first, rest = split_pattern(path.parts, lambda parts: Path(*parts).exists())
    store = LocalStore(Path(*first))
    return SourceFiles(store, matching(store, "/".join(rest), str(path)))


def url_files(url: str, suffix: str) -> SourceFiles:
    scheme, _, place = url.partition("://")

    def is_there(parts: list[str]) -> bool:
        return holds_files(open_store(f"{scheme}://{'/'.join(parts)}"))

    parts = place.rstrip("/").split("/")
    if find_file(url):
        folder, name = split_url(url)
        return SourceFiles(open_store(folder), [name])
    if not any(map(is_pattern, parts)) or is_there(parts):
        return all_files(open_store(url), suffix)
    first, rest = split_pattern(parts, is_there)
    store = open_store(f"{scheme}://{'/'.join(first)}")
    return SourceFiles(store, matching(store, "/".join(rest), url))


def all_files(store: Store, suffix: str) -> SourceFiles:
    listing = ImageFolder(store).listing()
    return SourceFiles(store, sorted(name for name in listing.names if name.lower().endswith(suffix)), listing)


def names_in(store: Store, listed: Store, name: str) -> list[str]:
    """Return the files of a name, or of a pattern without braces; `listed` is the same store, to look at all names."""
    if has_magic(name):
        return [*dict.fromkeys(matches(listed, "", name.split("/")))]
    return [name] if is_file(store, name) else []


def matches(store: Store, folder: str, wanted: list[str]) -> Iterator[str]:
    """Yield the files that a pattern names from a folder on: `*` stays within a part, `**` are any folders."""
    part, rest = wanted[0], wanted[1:]
    if part == "**":
        if rest:
            yield from matches(store, folder, rest)
        for entry in entries_of(store, folder):
            if entry.endswith("/"):
                yield from matches(store, f"{folder}{entry}", wanted)
        return
    found = [entry.rstrip("/") for entry in entries_of(store, folder)] if has_magic(part) else [part]
    for name in found:
        if fnmatchcase(name, part) or not has_magic(part):
            if rest:
                yield from matches(store, f"{folder}{name}/", rest)
            elif is_file(store, f"{folder}{name}"):
                yield f"{folder}{name}"


def entries_of(store: Store, folder: str) -> list[str]:
    try:
        return store.list(folder.rstrip("/"))
    except (NotADirectoryError, PermissionError):
        return []


def is_file(store: Store, name: str) -> bool:
    try:
        store.stat(name)
    except (FileNotFoundError, NotADirectoryError, NotAFileError):
        return False
    return True


def is_pattern(part: str) -> bool:
    return has_magic(part) or "{" in part


def split_pattern(parts: Iterable[str], is_there: Callable[[list[str]], bool]) -> tuple[list[str], list[str]]:
    """Split parts before the first that is a pattern, or before the last; a folder that is there is no pattern."""
    each = [*parts]
    for place, part in enumerate(each[:-1]):
        if is_pattern(part) and not is_there(each[: place + 1]):
            return each[:place], each[place:]
    return each[:-1], each[-1:]


def matching(store: Store, pattern: str, shown: str) -> list[str]:
    """Return the names that a pattern stands for, each once; MissingPathError if one that it spells out is absent."""
    names, wanted = set[str](), islice(expanded(pattern), MAX_FILES + 1)
    find = partial(names_in, store, with_listing(store))
    for number, some in enumerate(iter(lambda: [*islice(wanted, ASKED_AT_ONCE)], [])):
        if number * ASKED_AT_ONCE + len(some) > MAX_FILES:
            raise ConfigError(f"source.path: {shown} names more than {MAX_FILES:,} files")
        for name, found in zip(some, map_calls(store, find, some), strict=True):
            if not found:
                raise MissingPathError(f"source.path: {shown.removesuffix(pattern)}{name} does not exist")
            names.update(each for each in found if not is_mac_metadata(each.rpartition("/")[2]))
    return sorted(names)


def expanded(pattern: str) -> Iterator[str]:
    """Yield what a shell makes of braces."""
    if (found := BRACES.search(pattern)) is None:
        yield pattern
        return
    first, last, words = found.groups()
    width = len(first) if words is None and first.startswith("0") else 0
    choices = words.split(",") if words else (f"{number:0{width}}" for number in range(int(first), int(last) + 1))
    for choice in choices:
        yield from expanded(pattern[: found.start()] + choice + pattern[found.end() :])
