"""Find the files that `source.path` names: one, a folder's, or a pattern's, such as `shards/{00000..00099}.tar`."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from glob import has_magic
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


@dataclass(frozen=True)
class SourceFiles:
    """Files of a store, each in its first version that was seen."""

    store: Store
    """The folder, or the file's folder, or the part of the path before the first pattern."""
    names: list[str]
    """File names relative to the store, sorted."""
    skipped: Counter[str] = field(default_factory=Counter)
    """What else a listed folder holds, by kind."""
    _versions: dict[str, Version] = field(default_factory=dict, repr=False)

    def skipped_in(self, part: Names) -> Counter[str]:
        """Return a new count of skipped files: once, for the first part or for all."""
        return Counter(self.skipped if part == ALL or part[0] == self.names[0] else ())

    def where(self, name: str) -> str:
        return self.store.where(name)

    def open(self, name: str) -> File:
        """Open a file; FileNotFoundError if it is gone, ChangedError at a read if it is not in its first version."""
        file = self.store.open(name, self._versions.get(name))
        self._versions.setdefault(name, file.version)
        return file

    def grouped(self, rows: int, rows_of_first: int) -> list[Names]:
        """Group whole files by some `rows` samples, as many for their bytes as in the first file."""
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
        names = part or self.names
        try:
            stamps = map_calls(self.store, self._stamp, names)
        except FileNotFoundError:
            return None
        return hashlib.sha256(ascii([*zip(names, stamps, strict=True)]).encode()).hexdigest()

    def _stamp(self, name: str) -> str:
        version = self.store.stat(name)
        if self._versions.setdefault(name, version) != version:
            raise changed_error(self.where(name))
        return version.stamp


def find_files(pattern: str, suffix: str) -> SourceFiles:
    path = pattern.rstrip("/") if is_url(pattern) else str(Path(pattern).expanduser())
    files = named_files(path, suffix) or matching_files(path)
    if not files.names:
        raise MissingPathError(f"source.path: {pattern} holds no {suffix} file")
    return files


def named_files(path: str, suffix: str) -> SourceFiles | None:
    if is_url(path):
        if find_file(path):
            folder, name = split_url(path)
            return SourceFiles(open_store(folder), [name])
        store, is_folder = open_store(path), holds_files(open_store(path))
    else:
        if Path(path).is_file():
            return SourceFiles(LocalStore(Path(path).parent), [Path(path).name])
        store, is_folder = LocalStore(Path(path)), Path(path).is_dir()
    if not is_folder:
        return None
    listing = ImageFolder(store).listing()
    return SourceFiles(store, [name for name in listing.names if name.lower().endswith(suffix)], listing.skipped)


def matching_files(path: str) -> SourceFiles:
    """Return the files that match a pattern; raise MissingPathError if one that it spells out is gone."""
    parts = path.split("/")
    first = next((place for place, part in enumerate(parts) if has_magic(part) or "{" in part), len(parts) - 1)
    if "**" in parts:
        raise ConfigError(f"source.path: {path}: name the folder instead of **; all that is in it is found")
    folder, pattern = "/".join(parts[:first]), "/".join(parts[first:])
    store = open_store(folder) if is_url(path) else LocalStore(Path(folder or ("/" if first else ".")))
    wanted = expand_braces(pattern)
    matches = map_calls(store, partial(find_names, store, with_listing(store)), wanted)
    if missing := [name for name, found in zip(wanted, matches, strict=True) if not found]:
        named = abridge([f"{path.removesuffix(pattern)}{name}" for name in missing], most=MOST_NAMED)
        raise MissingPathError(f"source.path: {named} {'does' if len(missing) == 1 else 'do'} not exist")
    return SourceFiles(store, sorted({each for found in matches for each in found if not is_mac_metadata(each)}))


def find_names(store: Store, listed: Store, name: str) -> list[str]:
    """Return the files of a name or a pattern without braces; `listed` is the same store with a kept listing."""
    if not has_magic(name):
        return [name] if is_file(store, name) else []
    found, (*folders, last) = [""], name.split("/")
    for part in (*(f"{folder}/" for folder in folders), last):  # names of folders end with a slash in listings, too
        entries = ((folder, entry) for folder in found for entry in listed.list(folder.rstrip("/")))
        found = [f"{folder}{entry}" for folder, entry in entries if fnmatchcase(entry, part)]
    return found


def is_file(store: Store, name: str) -> bool:
    try:
        store.stat(name)
    except (FileNotFoundError, NotADirectoryError, NotAFileError):
        return False
    return True


def expand_braces(pattern: str) -> list[str]:
    """Expand braces as a shell does; a brace without its other half stands for itself."""
    try:
        return [*braceexpand(pattern)]
    except ValueError:  # unbalanced
        return [pattern]
