"""What a source lists: its samples, and the files and folders that are no samples, which are counted and reported."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple, Self

from cache_store.refusal import printable

COMMONEST = 5
"""Suffixes shown with their number of files."""

MAX_SUFFIX, MAX_SUFFIXES = 12, 1_000
"""Characters of a suffix, and suffixes, that are counted by name: file names are untrusted, memory is bounded."""

NO_SUFFIX, OTHER_SUFFIX = "without a suffix", "of other suffixes"

HEIC = (".heic", ".heif", ".hif")

SHOWN_CHARACTERS = 100


class Listing(NamedTuple):
    """The names in a folder or an archive, each sorted; macOS metadata is ignored."""

    names: list[str]
    """Of files."""
    not_utf8: list[str]
    """Of files that cannot enter a table, with surrogates for the bytes that are no text."""
    linked_folders: list[str]
    """Links to folders, which are not followed: they may lead in circles."""
    caches: list[str]
    """Folders that `precompute build` has made."""


@dataclass(frozen=True)
class NameCount:
    """How many names there are, and the first of them."""

    count: int = 0
    first: str = ""

    @classmethod
    def from_names(cls, names: list[str]) -> Self:
        return cls(len(names), names[0]) if names else cls()


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """Files and folders of a source that are no samples; captions in use and macOS metadata are not among them."""

    suffixes: Mapping[str, int] = field(default_factory=dict)
    """Number of files by suffix."""
    not_utf8: NameCount = NameCount()
    linked_folders: NameCount = NameCount()
    caches: NameCount = NameCount()

    def __str__(self) -> str:
        """One line; empty where nothing was passed over."""
        parts = [
            suffixes_line(self.suffixes),
            named_line(self.not_utf8, "file whose name is not UTF-8", "files whose names are not UTF-8"),
            named_line(self.linked_folders, "linked folder", "linked folders"),
            named_line(self.caches, "folder that is a cache", "folders that are caches"),
            "convert HEIC to JPEG or PNG, as with the package pillow-heif" if {*HEIC} & {*self.suffixes} else "",
        ]
        return f"passed over: {line}" if (line := "; ".join(filter(None, parts))) else ""


@dataclass(frozen=True)
class Samples:
    """A source's samples (id, uri, conversations, fingerprint), and what else it holds."""

    each: Iterable[dict[str, object]]
    passed_over: PassedOver = PassedOver()
    in_rows: bool = False
    """Whether their order is that of the planned rows; otherwise it has no meaning."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        return iter(self.each)


def count_suffixes(names: Iterable[str]) -> Counter[str]:
    """Number of names by suffix, in lower case."""
    counts: Counter[str] = Counter()
    for name in names:
        suffix = counted_suffix(name)
        counts[suffix if suffix in counts or len(counts) < MAX_SUFFIXES else OTHER_SUFFIX] += 1
    return counts


def counted_suffix(name: str) -> str:
    suffix = PurePosixPath(name).suffix.lower()
    if not suffix:
        return NO_SUFFIX
    return suffix if suffix[1:].isalnum() and suffix.isprintable() and len(suffix) <= MAX_SUFFIX else OTHER_SUFFIX


def suffixes_line(suffixes: Mapping[str, int]) -> str:
    """`3 files that are no images by their names (.txt 2, .eps 1)`."""
    if not (total := sum(suffixes.values())):
        return ""
    named = [(-count, suffix) for suffix, count in suffixes.items() if suffix.startswith(".")]
    shown = [f"{suffix} {-count:,}" for count, suffix in sorted(named)[:COMMONEST]]
    without = suffixes.get(NO_SUFFIX, 0)
    others = total - without + sum(count for count, _ in sorted(named)[:COMMONEST])
    shown += [f"{count:,} {kind}" for count, kind in ((without, NO_SUFFIX), (others, OTHER_SUFFIX)) if count]
    what = "file that is no image by its name" if total == 1 else "files that are no images by their names"
    return f"{total:,} {what} ({', '.join(shown)})"


def named_line(named: NameCount, one: str, several: str) -> str:
    if not named.count:
        return ""
    first = shown_name(named.first)
    return f"1 {one} ({first})" if named.count == 1 else f"{named.count:,} {several} (first: {first})"


def shown_name(name: str) -> str:
    """Shorten a name to one line; as bytes where it is not UTF-8."""
    if not is_utf8(name):
        return repr(os.fsencode(name)[:SHOWN_CHARACTERS])
    return printable(name)[:SHOWN_CHARACTERS]


def is_utf8(name: str) -> bool:
    """Whether a name can enter a table: the system's names are bytes, of which Python makes surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
