"""Find the files that `source.path` names: one, a folder's, or a pattern's, such as `shards/{00000..00099}.tar`."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from glob import has_magic
from itertools import islice
from pathlib import Path

from braceexpand import braceexpand

from cache_store.errors import ConfigError, MissingPathError, NotAFileError
from cache_store.messages import abridge
from cache_store.storage.local import LocalStore
from cache_store.storage.protocol import File, Version, changed_error
from cache_store.storage.store import Store, is_url, map_calls, open_store, split_url, with_listing
from precompute.sources.image_store import ImageFolder, find_file, holds_files
from precompute.sources.images import ALL, Names
from precompute.sources.listing import MOST_NAMED, is_mac_metadata

MAX_FILES = 1_000_000

ASKED_AT_ONCE = 256
"""Names looked up at the same time."""


@dataclass(frozen=True)
class SourceFiles:
    """Files of a store, each in the version that was first seen."""

    store: Store
    """The folder, or the file's folder, or the part of the path before the first pattern."""
    names: list[str]
    """File names, sorted and relative to the store, so that they stay the same when other files are added."""
    skipped: Counter[str] = field(default_factory=Counter)
    """What else a listed folder holds, by kind."""
    _versions: dict[str, Version] = field(default_factory=dict, repr=False)

    def skipped_in(self, part: Names) -> Counter[str]:
        """Return a new count of what is skipped besides the files, once: for the first part, or for all."""
        return Counter(self.skipped if part == ALL or part[0] == self.names[0] else ())

    def where(self, name: str) -> str:
        return self.store.where(name)

    def open(self, name: str) -> File:
        """Open a file in its first version; FileNotFoundError if it is gone, ChangedError at a read if it changed."""
        file = self.store.open(name, self._versions.get(name))
        self._versions.setdefault(name, file.version)
        return file

    def grouped(self, rows: int, rows_of_first: int) -> list[Names]:
        """Group whole files, each group with some `rows` samples if all files hold as many for their bytes."""
        groups, held = [list[str]()], 0.0
        sizes = [version.size for version in map_calls(self.store, self.store.stat, self.names)]
        for name, size in zip(self.names, sizes, strict=True):
            if held >= rows:
                groups.append([])
                held = 0.0
            groups[-1].append(name)
            held += size * rows_of_first / max(sizes[0], 1)
        return [tuple(group) for group in groups] if len(groups) > 1 else [ALL]

    def version(self, part: Names = ALL) -> str | None:
        """Return a digest of all names and stamps; None if a file is gone, which a listing reports."""
        digest, names = hashlib.sha256(), iter(part or self.names)
        try:
            for block in iter(lambda: [*islice(names, ASKED_AT_ONCE)], []):
                stamps = map_calls(self.store, self._stamp, block)
                digest.update(ascii([*zip(block, stamps, strict=True)]).encode())
        except FileNotFoundError:
            return None
        return digest.hexdigest()

    def _stamp(self, name: str) -> str:
        version = self.store.stat(name)
        if self._versions.setdefault(name, version) != version:
            raise changed_error(self.where(name))
        return version.stamp


def find_files(pattern: str, suffix: str) -> SourceFiles:
    """Find the files; raise MissingPathError if there are none, or if a named one is not there."""
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
    return SourceFiles(store, expand_pattern(store, "/".join(rest), str(path)))


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
    return SourceFiles(store, expand_pattern(store, "/".join(rest), url))


def all_files(store: Store, suffix: str) -> SourceFiles:
    listing = ImageFolder(store).listing()
    return SourceFiles(store, [name for name in listing.names if name.lower().endswith(suffix)], listing.skipped)


def find_names(store: Store, listed: Store, name: str) -> list[str]:
    """Return the files of a name, or of a pattern without braces; `listed` is the same store with a kept listing."""
    if has_magic(name):
        return [*dict.fromkeys(find_matches(listed, "", name.split("/")))]
    return [name] if is_file(store, name) else []


def find_matches(store: Store, folder: str, wanted: list[str]) -> Iterator[str]:
    """Yield the files below a folder that match a pattern's parts; `**` matches any folders, `*` one part."""
    part, rest = wanted[0], wanted[1:]
    if part == "**":
        if rest:
            yield from find_matches(store, folder, rest)
        for entry in entries_of(store, folder):
            if entry.endswith("/"):
                yield from find_matches(store, f"{folder}{entry}", wanted)
        return
    found = [entry.rstrip("/") for entry in entries_of(store, folder)] if has_magic(part) else [part]
    for name in found:
        if fnmatchcase(name, part) or not has_magic(part):
            if rest:
                yield from find_matches(store, f"{folder}{name}/", rest)
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
    """Split before the first pattern, or before the last part; if a folder has a pattern's exact name, it is used."""
    each = [*parts]
    for place, part in enumerate(each[:-1]):
        if is_pattern(part) and not is_there(each[: place + 1]):
            return each[:place], each[place:]
    return each[:-1], each[-1:]


def expand_pattern(store: Store, pattern: str, shown: str) -> list[str]:
    """Return the files that a pattern matches, each once; raise MissingPathError if one that it spells out is gone."""
    names, wanted = set[str](), islice(expand_braces(pattern), MAX_FILES + 1)
    find = partial(find_names, store, with_listing(store))
    for number, block in enumerate(iter(lambda: [*islice(wanted, ASKED_AT_ONCE)], [])):
        if number * ASKED_AT_ONCE + len(block) > MAX_FILES:
            raise ConfigError(f"source.path: {shown} names more than {MAX_FILES:,} files")
        matches = map_calls(store, find, block)
        if missing := [name for name, found in zip(block, matches, strict=True) if not found]:
            named = abridge([f"{shown.removesuffix(pattern)}{name}" for name in missing], most=MOST_NAMED)
            raise MissingPathError(f"source.path: {named} {'does' if len(missing) == 1 else 'do'} not exist")
        for found in matches:
            names.update(each for each in found if not is_mac_metadata(each.rpartition("/")[2]))
    return sorted(names)


def expand_braces(pattern: str) -> Iterator[str]:
    """Expand braces as a shell does; a brace without its other half stands for itself."""
    try:
        yield from braceexpand(pattern)
    except ValueError:  # unbalanced
        yield pattern
