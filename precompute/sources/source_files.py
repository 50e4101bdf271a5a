"""Files that `source.path` names: one, all of a folder, or those of a pattern such as `shards/{00000..00099}.tar`."""

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from glob import has_magic
from itertools import islice, tee
from pathlib import Path

from cache_store.errors import ConfigError, MissingPathError
from cache_store.storage.objects.client import pool
from cache_store.storage.store import is_url
from precompute.sources.archives.archive import is_mac_metadata
from precompute.sources.archives.image_store import ImageFolder
from precompute.sources.archives.listing import Listing, no_listing
from precompute.sources.archives.remote_images import RemoteImages
from precompute.sources.files.file import LocalFile, SourceFile, Version, refuse_changed
from precompute.sources.files.remote import RemoteFile, RemoteFolder
from precompute.sources.files.urls import find_file, is_folder, open_folder, split_url

BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{},]*(?:,[^{},]*)+))\}")
"""`{00..12}` or `{a,b}`, with no other braces in it."""

MAX_FILES = 1_000_000

ASKED_AT_ONCE = 256


@dataclass(frozen=True)
class SourceFiles:
    root: str
    """The folder, or that of the file, or the one before the first part of the pattern that is no name."""
    names: list[str]
    """In order, relative to it: so a name stays the same when other files are added."""
    find: Callable[[str], SourceFile]
    """By name, as it is now; FileNotFoundError where it is gone."""
    listing: Listing = field(default_factory=no_listing)
    """What else a folder holds."""
    _versions: dict[str, Version] = field(default_factory=dict, repr=False)
    """By name, from when each was first opened."""

    def where(self, name: str) -> str:
        return f"{self.root}/{name}"

    def open(self, name: str) -> SourceFile:
        """As it was the first time; SourceError where it has changed since, FileNotFoundError where it is gone."""
        file = self.find(name)
        if self._versions.setdefault(name, file.version) != file.version:
            refuse_changed(file)
        return file

    def version(self) -> str | None:
        """By the names and stamps of all; None where one is gone: listing names it."""
        digest, names = hashlib.sha256(), iter(self.names)
        asked = pool().map if is_url(self.root) else map
        try:
            for some in iter(lambda: [*islice(names, ASKED_AT_ONCE)], []):
                stamps = [file.stamp for file in asked(self.open, some)]
                digest.update(ascii([*zip(some, stamps, strict=True)]).encode())
        except FileNotFoundError:
            return None
        return digest.hexdigest()


def find_files(pattern: str, suffix: str) -> SourceFiles:
    """The files; MissingPathError where there are none, or where one that is named is not there."""
    files = url_files(pattern, suffix) if is_url(pattern) else local_files(Path(pattern).expanduser(), suffix)
    if not files.names:
        raise MissingPathError(f"source.path: {pattern} holds no {suffix} file")
    return files


def local_files(path: Path, suffix: str) -> SourceFiles:
    listing = no_listing()
    if path.is_dir():
        root, listing = path, ImageFolder(path).listing()
        names = with_suffix(listing.names, suffix)
    elif path.exists():
        root, names = path.parent, [path.name]
    else:
        first, rest = split_pattern(path.parts, lambda parts: Path(*parts).exists())
        root = Path(*first)
        names = matching("/".join(rest), str(path), partial(map, partial(names_in, root)))
    return SourceFiles(str(root), names, lambda name: LocalFile(root / name), listing)


def names_in(root: Path, name: str) -> list[str]:
    """What is there of a name or of a pattern without braces."""
    paths = root.glob(name) if has_magic(name) else [root / name]
    return [path.relative_to(root).as_posix() for path in paths if path.is_file()]


def url_files(url: str, suffix: str) -> SourceFiles:
    listing = no_listing()
    scheme, _, place = url.partition("://")

    def is_there(parts: list[str]) -> bool:
        return is_folder(f"{scheme}://{'/'.join(parts)}")

    parts = place.rstrip("/").split("/")
    if find_file(url):
        (root, name), names = split_url(url), []
        names = [name]
    elif not any(map(is_pattern, parts)) or is_there(parts):
        root, listing = url.rstrip("/"), RemoteImages(open_folder(url)).listing()
        names = with_suffix(listing.names, suffix)
    else:
        first, rest = split_pattern(parts, is_there)
        root = f"{scheme}://{'/'.join(first)}"
        names = matching("/".join(rest), url, RemoteNames(open_folder(root)).of)
    folder = open_folder(root)
    return SourceFiles(root, names, lambda name: RemoteFile(folder, name), listing)


class RemoteNames:
    """Names below a URL, listed once if there is a pattern that needs it."""

    def __init__(self, folder: RemoteFolder) -> None:
        self._folder, self._listed, self._listing = folder, list[str](), threading.Lock()

    def of(self, names: Iterable[str]) -> Iterator[list[str]]:
        """What is there of each name, many asked for at the same time."""
        rest = iter(names)
        for some in iter(lambda: [*islice(rest, ASKED_AT_ONCE)], []):
            yield from pool().map(self._matching, some)

    def _matching(self, name: str) -> list[str]:
        """What is there of a name or of a pattern without braces."""
        if not has_magic(name):
            return [name] if self._is_file(name) else []
        with self._listing:
            self._listed = self._listed or [each for each, _ in self._folder.files()]
        wanted = name.split("/")
        return [each for each in self._listed if matches(each.split("/"), wanted)]

    def _is_file(self, name: str) -> bool:
        try:
            self._folder.head(name)
        except FileNotFoundError:
            return False
        return True


def matches(parts: list[str], wanted: list[str]) -> bool:
    """Whether a name is of a pattern, as in folders: `*` stays within a part, `**` are any folders."""
    if not wanted or not parts:
        return not wanted and not parts
    if wanted[0] == "**":
        return matches(parts, wanted[1:]) or matches(parts[1:], wanted)
    return fnmatchcase(parts[0], wanted[0]) and matches(parts[1:], wanted[1:])


def with_suffix(names: Iterable[str], suffix: str) -> list[str]:
    return sorted(name for name in names if name.lower().endswith(suffix))


def is_pattern(part: str) -> bool:
    return has_magic(part) or "{" in part


def split_pattern(parts: Iterable[str], is_there: Callable[[list[str]], bool]) -> tuple[list[str], list[str]]:
    """The parts before the first that is a pattern, or before the last; and the rest. What is there is no pattern."""
    each = [*parts]
    for place, part in enumerate(each[:-1]):
        if is_pattern(part) and not is_there(each[: place + 1]):
            return each[:place], each[place:]
    return each[:-1], each[-1:]


def matching(pattern: str, shown: str, names_of: Callable[[Iterable[str]], Iterable[list[str]]]) -> list[str]:
    """The names that a pattern stands for, each once; MissingPathError where one that it spells out is not there."""
    names, (wanted, asked) = set[str](), tee(islice(expanded(pattern), MAX_FILES + 1))
    for number, (name, found) in enumerate(zip(wanted, names_of(asked), strict=True)):
        if number == MAX_FILES:
            raise ConfigError(f"source.path: {shown} names more than {MAX_FILES:,} files")
        if not found:
            raise MissingPathError(f"source.path: {shown.removesuffix(pattern)}{name} does not exist")
        names.update(each for each in found if not is_mac_metadata(each.rpartition("/")[2]))
    return sorted(names)


def expanded(pattern: str) -> Iterator[str]:
    """What a shell makes of braces."""
    if (found := BRACES.search(pattern)) is None:
        yield pattern
        return
    first, last, words = found.groups()
    width = len(first) if words is None and first.startswith("0") else 0
    choices = words.split(",") if words else (f"{number:0{width}}" for number in range(int(first), int(last) + 1))
    for choice in choices:
        yield from expanded(pattern[: found.start()] + choice + pattern[found.end() :])
