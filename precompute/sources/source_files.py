"""Files that `source.path` names: one, all of a folder, or those of a pattern such as `shards/{00000..00099}.tar`."""

import re
from collections.abc import Iterator
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from cache_store.errors import ConfigError, MissingPathError
from precompute.sources.archives.archive import is_mac_metadata
from precompute.sources.archives.image_store import ImageFolder
from precompute.sources.archives.listing import Listing, no_listing

BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{},]*(?:,[^{},]*)+))\}")
"""`{00..12}` or `{a,b}`, with no other braces in it."""

MAX_FILES = 1_000_000


class SourceFiles(NamedTuple):
    root: Path
    """The folder, or that of the file, or the one before the first part of the pattern that is no name."""
    names: list[str]
    """In order, relative to it: so a name stays the same when other files are added."""
    listing: Listing
    """What else a folder holds."""


def find_files(pattern: str, suffix: str) -> SourceFiles:
    """The files; MissingPathError where there are none, or where one that is named is not there."""
    path = Path(pattern).expanduser()
    if path.is_dir():
        listing = ImageFolder(path).listing()
        files = SourceFiles(path, sorted(name for name in listing.names if name.lower().endswith(suffix)), listing)
    elif path.exists():
        files = SourceFiles(path.parent, [path.name], no_listing())
    else:
        root, names = matching(path)
        files = SourceFiles(root, names, no_listing())
    if not files.names:
        raise MissingPathError(f"source.path: {path} holds no {suffix} file")
    return files


def matching(pattern: Path) -> tuple[Path, list[str]]:
    """The folder that a pattern begins with, and the names in it that it stands for, each once."""
    magic = (place for place, part in enumerate(pattern.parts) if has_magic(part) or "{" in part)
    place = next(magic, len(pattern.parts) - 1)
    root, names = Path(*pattern.parts[:place]), set[str]()
    for number, name in enumerate(islice(expanded("/".join(pattern.parts[place:])), MAX_FILES + 1)):
        if number == MAX_FILES:
            raise ConfigError(f"source.path: {pattern} names more than {MAX_FILES:,} files")
        paths = [path for path in (root.glob(name) if has_magic(name) else [root / name]) if path.is_file()]
        if not paths:
            raise MissingPathError(f"source.path: {root / name} does not exist")
        names.update(path.relative_to(root).as_posix() for path in paths if not is_mac_metadata(path.name))
    return root, sorted(names)


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
