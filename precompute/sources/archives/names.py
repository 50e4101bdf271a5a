"""Millions of names in columns, one text and 28 bytes of numbers per name; and the listing of a source.

A set of Python strings takes some 150 bytes per name. A name is found by 64 bits of a keyed hash, so that nobody can
make names that collide, and then compared. Processes can share the columns; Python's own hash differs per process.
"""

import hashlib
import os
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache_store.refusal import counted, printable

ESCAPES = "surrogatepass"
"""File names are bytes, and Python turns invalid ones into surrogates."""

NOT_POSIX = re.compile(r"\A\Z|\A\./|//|/\./|/\.?\Z")
"""Matches a name that is not in normal form; this test takes a fifth of the time of parsing the name."""

HASH_BYTES, KEY_BYTES = 8, 16


def as_posix(name: str) -> str:
    """Return the normal form of a name: `./a//b` becomes `a/b`."""
    return PurePosixPath(name).as_posix() if NOT_POSIX.search(name) else name


class NameColumns(NamedTuple):
    """Names as arrays, numbered from 0 in the order given."""

    key: NDArray[np.uint8]
    """The key of the hashes."""
    text: NDArray[np.uint8]
    ends: NDArray[np.int64]
    """Where each name begins in the text, and where the last one ends."""
    hashes: NDArray[np.int64]
    """The names' hashes, sorted."""
    by_hash: NDArray[np.uint32]
    """The number of each hash's name."""
    firsts: NDArray[np.uint32]
    """For each name, the number of the first equal one."""
    times: NDArray[np.uint32]
    """How often each name occurs, at its first number; 0 at its other numbers."""


class Names(Collection[str]):
    """Names in the order given, numbered from 0; a name may occur more than once."""

    def __init__(self, names: Iterable[str] | NameColumns) -> None:
        self.columns = columns = names if isinstance(names, NameColumns) else columns_of(names)
        self.firsts, self.times = columns.firsts, columns.times
        self._key = columns.key.tobytes()
        self._text, self._ends = columns.text.data, columns.ends.data  # faster to index than arrays

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> str:
        return str(self._text[self._ends[number] : self._ends[number + 1]], "utf-8", ESCAPES)

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None

    def find(self, name: str) -> int | None:
        """Return the first number of a name; None if it does not occur."""
        wanted = int.from_bytes(hash_of(name.encode(errors=ESCAPES), self._key), "little", signed=True)
        place = int(self.columns.hashes.searchsorted(wanted))
        while place < len(self) and self.columns.hashes[place] == wanted:
            if self[number := int(self.columns.by_hash[place])] == name:
                return number
            place += 1
        return None

    def in_order(self, is_chosen: NDArray[np.bool_]) -> NDArray[Any]:
        """Return the numbers of the chosen names, sorted by name."""
        text = [None, pa.py_buffer(self.columns.ends), pa.py_buffer(self.columns.text)]
        order = pc.sort_indices(pa.Array.from_buffers(pa.large_binary(), len(self), text)).to_numpy()
        chosen: NDArray[Any] = order[is_chosen[order]]
        return chosen


def hash_of(name: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=HASH_BYTES, key=key).digest()


def columns_of(names: Iterable[str]) -> NameColumns:
    text, ends, hashes, key = bytearray(), array("q", [0]), bytearray(), os.urandom(KEY_BYTES)
    for name in names:
        encoded = name.encode(errors=ESCAPES)
        text += encoded
        ends.append(len(text))
        hashes += hash_of(encoded, key)
    unsorted = np.frombuffer(hashes, "<i8")
    by_hash = np.argsort(unsorted, kind="stable").astype(np.uint32)
    columns = NameColumns(
        key=np.frombuffer(key, np.uint8),
        text=np.frombuffer(text, np.uint8),
        ends=np.frombuffer(ends, np.int64),
        hashes=unsorted[by_hash],
        by_hash=by_hash,
        firsts=np.arange(len(by_hash), dtype=np.uint32),
        times=np.empty(0, np.uint32),
    )
    find_firsts(columns)
    return columns._replace(times=np.bincount(columns.firsts, minlength=len(by_hash)).astype(np.uint32))


def find_firsts(columns: NameColumns) -> None:
    """Fill `firsts`: give each repeated name the number of its first occurrence."""
    names, places = Names(columns), np.arange(len(columns.by_hash), dtype=np.uint32)
    is_again = np.zeros(len(places), bool)
    is_again[1:] = columns.hashes[1:] == columns.hashes[:-1]
    again = places[is_again]
    begins = np.maximum.accumulate(np.where(is_again, 0, places))[is_again]  # of each one's run of equal hashes
    same_hash: dict[str, int] = {}
    for number, first in zip(columns.by_hash[again].data, columns.by_hash[begins].data, strict=True):
        name = names[number]
        columns.firsts[number] = first if name == names[first] else same_hash.setdefault(name, number)


class ChosenNames(Collection[str]):
    """Some of the names, each once, in an order of their own."""

    def __init__(self, names: Names, numbers: NDArray[Any]) -> None:
        self._names, self._numbers = names, numbers.astype(np.uint32)
        self._is_chosen = np.zeros(len(names), bool)
        self._is_chosen[numbers] = True

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return map(self._names.__getitem__, self._numbers.data)

    def __getitem__(self, place: int) -> str:
        return self._names[self._numbers[place]]

    def __contains__(self, name: object) -> bool:
        number = self._names.find(name) if isinstance(name, str) else None
        return number is not None and bool(self._is_chosen[number])


COMMONEST = 5
"""Most suffixes that are shown with their number of files."""

MAX_SUFFIX = 12
"""Longest suffix, in characters, that is counted by itself."""

NO_SUFFIX, OTHER_SUFFIX = "without a suffix", "with other suffixes"

HIDDEN, OTHER_IMAGE = "hidden", "other image"
"""Kinds of skipped files that are not counted by suffix."""

HEIC = (".heic", ".heif", ".hif")

SHOWN_CHARACTERS = 100


class Listing(NamedTuple):
    """The names in a folder or an archive, each sorted; macOS metadata is ignored."""

    names: Collection[str]
    """Files whose names are UTF-8; a membership test is fast."""
    not_utf8: list[str]
    """Files whose names are not UTF-8, with surrogates for the invalid bytes."""
    linked_folders: list[str]
    """Links to folders, which are not followed: they may lead in circles."""
    caches: list[str]
    """Folders that are caches."""


def no_listing() -> Listing:
    return Listing(names=Names([]), not_utf8=[], linked_folders=[], caches=[])


@dataclass(frozen=True)
class Samples:
    """A source's samples (id, uri, conversations, fingerprint), and a count of its other files."""

    each: Iterable[dict[str, object]]
    listing: Listing = field(default_factory=no_listing)
    """The listing that the samples come from."""
    others: Counter[str] = field(default_factory=Counter)
    """Number of files that are not samples, by suffix or kind."""
    in_rows: bool = False
    """Whether the samples come in the order of the planned rows; otherwise their order has no meaning."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        return iter(self.each)

    @property
    def skipped_note(self) -> str:
        """One line on the files and folders that are not samples; empty if there are none.

        Some sources know them only after all samples are listed.
        """
        return format_skipped(self.listing, self.others)


def format_skipped(listing: Listing, suffixes: Counter[str]) -> str:
    hidden, images = suffixes[HIDDEN], suffixes[OTHER_IMAGE]
    parts = [
        suffixes_line(suffixes - Counter({HIDDEN: hidden, OTHER_IMAGE: images})),
        f"{counted(hidden, 'hidden file')} (names that begin with a dot)" if hidden else "",
        f"{counted(images, 'image')} with another extension than source.fields.image" if images else "",
        names_line(listing.not_utf8, "file whose name is not UTF-8", "files whose names are not UTF-8"),
        names_line(listing.linked_folders, "linked folder", "linked folders"),
        names_line(listing.caches, "folder that is a cache", "folders that are caches"),
        "convert HEIC to JPEG or PNG, for example with the package pillow-heif" if {*HEIC} & {*suffixes} else "",
    ]
    return f"skipped: {line}" if (line := "; ".join(filter(None, parts))) else ""


def suffix_of(name: str) -> str:
    """Return `PurePosixPath(name).suffix`, five times as fast."""
    stem, dot, suffix = name.rpartition("/")[2].rpartition(".")
    return dot + suffix if stem and suffix else ""


def counted_suffix(name: str) -> str:
    """Return the suffix in lower case, or the kind under which to count an unusual one."""
    suffix = suffix_of(name).lower()
    if not suffix:
        return NO_SUFFIX
    return suffix if suffix[1:].isalnum() and suffix.isprintable() and len(suffix) <= MAX_SUFFIX else OTHER_SUFFIX


def suffixes_line(suffixes: Counter[str]) -> str:
    """Format as `3 files without an image suffix (.txt 2, .eps 1)`."""
    if not (total := suffixes.total()):
        return ""
    named = sorted((-count, suffix) for suffix, count in suffixes.items() if suffix.startswith("."))[:COMMONEST]
    shown = [f"{suffix} {-count:,}" for count, suffix in named]
    without = suffixes[NO_SUFFIX]
    others = total - without + sum(count for count, _ in named)
    shown += [f"{count:,} {kind}" for count, kind in ((without, NO_SUFFIX), (others, OTHER_SUFFIX)) if count]
    return f"{counted(total, 'file')} without an image suffix ({', '.join(shown)})"


def names_line(names: list[str], one: str, several: str) -> str:
    if not names:
        return ""
    first = shown_name(names[0])
    return f"1 {one} ({first})" if len(names) == 1 else f"{len(names):,} {several} (first: {first})"


def shown_name(name: str) -> str:
    """Shorten a name to one line; show it as bytes if it is not UTF-8."""
    if not is_utf8(name):
        return repr(os.fsencode(name)[:SHOWN_CHARACTERS])
    return printable(name)[:SHOWN_CHARACTERS]


def is_utf8(name: str) -> bool:
    """Return whether a name is valid UTF-8, so that a table can hold it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
