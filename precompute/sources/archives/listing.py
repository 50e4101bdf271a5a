"""What a source lists: its samples, and the files and folders that are no samples, which are counted and reported."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from cache_store.refusal import counted, printable
from precompute.sources.archives.names import Names

COMMONEST = 5
"""Suffixes shown with their number of files."""

MAX_SUFFIX = 12
"""Characters of a suffix that is counted by name."""

NO_SUFFIX, OTHER_SUFFIX = "without a suffix", "of other suffixes"

HIDDEN, OTHER_IMAGE = "hidden", "other image"
"""Kinds of files that are counted beside the suffixes."""

HEIC = (".heic", ".heif", ".hif")

SHOWN_CHARACTERS = 100


class Listing(NamedTuple):
    """The names in a folder or an archive, each sorted; macOS metadata is ignored."""

    names: Collection[str]
    """Files that can enter a table; whether a name is one of them is quickly told."""
    not_utf8: list[str]
    """Files that cannot, with surrogates for the bytes that are no text."""
    linked_folders: list[str]
    """Links to folders, which are not followed: they may lead in circles."""
    caches: list[str]
    """Folders that `precompute build` has made."""


def no_listing() -> Listing:
    return Listing(names=Names([]), not_utf8=[], linked_folders=[], caches=[])


@dataclass(frozen=True)
class Samples:
    """A source's samples (id, uri, conversations, fingerprint), and what else it holds."""

    each: Iterable[dict[str, object]]
    listing: Listing = field(default_factory=no_listing)
    """What was listed to find them."""
    others: Counter[str] = field(default_factory=Counter)
    """Files that are no samples, by their counted suffix, or by their kind."""
    in_rows: bool = False
    """Whether their order is that of the planned rows; otherwise it has no meaning."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        return iter(self.each)

    @property
    def passed_over(self) -> str:
        """Files and folders that are no samples, in one line; empty where there are none. Some sources know them only
        once every sample has been listed.
        """
        return passed_over(self.listing, self.others)


def passed_over(listing: Listing, suffixes: Counter[str]) -> str:
    hidden, images = suffixes[HIDDEN], suffixes[OTHER_IMAGE]
    parts = [
        suffixes_line(suffixes - Counter({HIDDEN: hidden, OTHER_IMAGE: images})),
        f"{counted(hidden, 'hidden file')} (names that begin with a dot)" if hidden else "",
        f"{counted(images, 'image')} of another extension than source.fields.image" if images else "",
        names_line(listing.not_utf8, "file whose name is not UTF-8", "files whose names are not UTF-8"),
        names_line(listing.linked_folders, "linked folder", "linked folders"),
        names_line(listing.caches, "folder that is a cache", "folders that are caches"),
        "convert HEIC to JPEG or PNG, as with the package pillow-heif" if {*HEIC} & {*suffixes} else "",
    ]
    return f"passed over: {line}" if (line := "; ".join(filter(None, parts))) else ""


def suffix_of(name: str) -> str:
    """As `PurePosixPath(name).suffix`, in a fifth of the time."""
    stem, dot, suffix = name.rpartition("/")[2].rpartition(".")
    return dot + suffix if stem and suffix else ""


def counted_suffix(name: str) -> str:
    """In lower case, or the kind under which others are counted."""
    suffix = suffix_of(name).lower()
    if not suffix:
        return NO_SUFFIX
    return suffix if suffix[1:].isalnum() and suffix.isprintable() and len(suffix) <= MAX_SUFFIX else OTHER_SUFFIX


def suffixes_line(suffixes: Counter[str]) -> str:
    """Format as `3 files that are no images by their names (.txt 2, .eps 1)`."""
    if not (total := suffixes.total()):
        return ""
    named = sorted((-count, suffix) for suffix, count in suffixes.items() if suffix.startswith("."))[:COMMONEST]
    shown = [f"{suffix} {-count:,}" for count, suffix in named]
    without = suffixes[NO_SUFFIX]
    others = total - without + sum(count for count, _ in named)
    shown += [f"{count:,} {kind}" for count, kind in ((without, NO_SUFFIX), (others, OTHER_SUFFIX)) if count]
    what = "file that is no image by its name" if total == 1 else "files that are no images by their names"
    return f"{total:,} {what} ({', '.join(shown)})"


def names_line(names: list[str], one: str, several: str) -> str:
    if not names:
        return ""
    first = shown_name(names[0])
    return f"1 {one} ({first})" if len(names) == 1 else f"{len(names):,} {several} (first: {first})"


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
