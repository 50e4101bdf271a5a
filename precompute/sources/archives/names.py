"""Names by the million, in columns: their text in one piece and 28 bytes of numbers each; and what a source lists.

A set of Python's own strings takes some 150 bytes for each. A name is found by 64 bits of a hash with a key of its own,
so that nobody can make names that collide, and then compared. Processes can share the columns; Python's own hash
differs from process to process.
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
"""Names of files are bytes, and Python makes surrogates of those that are no text."""

NOT_POSIX = re.compile(r"\A\Z|\A\./|//|/\./|/\.?\Z")
"""In a name that has other forms; asking is a fifth of the time of looking at its parts."""

HASH_BYTES, KEY_BYTES = 8, 16


def as_posix(name: str) -> str:
    """Return a name in its one form: `./a//b` and `a/b` are one name."""
    return PurePosixPath(name).as_posix() if NOT_POSIX.search(name) else name


class NameColumns(NamedTuple):
    """All that is known of names, numbered from 0 in the order in which they came."""

    key: NDArray[np.uint8]
    """Of their hashes."""
    text: NDArray[np.uint8]
    ends: NDArray[np.int64]
    """Where each name begins in the text, and the end of the last."""
    hashes: NDArray[np.int64]
    """Sorted."""
    by_hash: NDArray[np.uint32]
    """The number of the name that has each of them."""
    firsts: NDArray[np.uint32]
    """For each name, the number of the first that is equal."""
    times: NDArray[np.uint32]
    """How often each name occurs, at its first number; 0 at the others."""


class Names(Collection[str]):
    """Names in the order in which they came, numbered from 0; one may come several times."""

    def __init__(self, names: Iterable[str] | NameColumns) -> None:
        self.columns = columns = names if isinstance(names, NameColumns) else columns_of(names)
        self.firsts, self.times = columns.firsts, columns.times
        self._key = columns.key.tobytes()
        self._text, self._ends = columns.text.data, columns.ends.data  # slices and numbers of Python's own are quicker

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> str:
        return str(self._text[self._ends[number] : self._ends[number + 1]], "utf-8", ESCAPES)

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None

    def find(self, name: str) -> int | None:
        """Return the first number of a name; None if it is not among them."""
        wanted = int.from_bytes(hash_of(name.encode(errors=ESCAPES), self._key), "little", signed=True)
        place = int(self.columns.hashes.searchsorted(wanted))
        while place < len(self) and self.columns.hashes[place] == wanted:
            if self[number := int(self.columns.by_hash[place])] == name:
                return number
            place += 1
        return None

    def in_order(self, is_chosen: NDArray[np.bool_]) -> NDArray[Any]:
        """The numbers of those that are chosen, sorted by name."""
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
    """Replace the number of each name that came before by that of the first."""
    names, places = Names(columns), np.arange(len(columns.by_hash), dtype=np.uint32)
    is_again = np.zeros(len(places), bool)
    is_again[1:] = columns.hashes[1:] == columns.hashes[:-1]
    again = places[is_again]
    begins = np.maximum.accumulate(np.where(is_again, 0, places))[is_again]
    """Of runs of equal hashes."""
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
