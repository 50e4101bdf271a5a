"""The files that a source lists: their names, and what it says of those that are no samples."""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import PurePosixPath
from typing import NamedTuple

from cache_store.errors import ChangedError, SourceError
from cache_store.messages import abridge, counted, printable
from precompute.clips.opened import SUFFIXES as VIDEO_SUFFIXES

NOT_POSIX = re.compile(r"\A\Z|\A\./|//|/\./|/\.?\Z")
"""Matches a name that is not in normal form; this test takes a fifth of the time of parsing the name."""


def as_posix(name: str) -> str:
    """Return the normal form of a name: `./a//b` becomes `a/b`."""
    return PurePosixPath(name).as_posix() if NOT_POSIX.search(name) else name


def is_mac_metadata(name: str) -> bool:
    """Return whether a file is macOS metadata.

    `._a.jpg` (AppleDouble) holds attributes of `a.jpg`, in zips below `__MACOSX`; `.DS_Store` holds a folder's view.
    """
    if "._" not in name and "__MACOSX" not in name and ".DS_Store" not in name:  # fast path for nearly all names
        return False
    *folders, last = PurePosixPath(name).parts or ("",)
    return last.startswith("._") or last == ".DS_Store" or "__MACOSX" in folders


COMMONEST = 5
"""Most suffixes that are shown with their number of files."""

MAX_SUFFIX = 12
"""Longest suffix, in characters, that is counted by itself."""

NO_SUFFIX, OTHER_SUFFIX = "without a suffix", "with other suffixes"

HIDDEN, OTHER_IMAGE = "hidden", "other image"
"""Kinds of skipped files that are not counted by suffix."""

TEXT_SUFFIXES = frozenset({".txt", ".caption", ".json", ".jsonl", ".csv"})
"""Suffixes of files that may hold captions, of other trainers too."""

MASKS = ("-masklabel", "-condlabel")
"""Ends of the names of OneTrainer's masks and condition images, which lie beside their images."""

MOST_NAMED = 10
"""Files that a message names before it says how many more there are."""

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
    return Listing(names=(), not_utf8=[], linked_folders=[], caches=[])


@dataclass(frozen=True)
class Samples:
    """A source's samples (id, uri, conversations, fingerprint, place, extra fields), in an order that stays the same;
    and a count of its other files.
    """

    each: Iterable[dict[str, object]]
    listing: Listing = field(default_factory=no_listing)
    """The listing that the samples come from."""
    others: Counter[str] = field(default_factory=Counter)
    """Number of files that are not samples, by suffix or kind."""
    masks: list[str] = field(default_factory=list)
    """Images that are left out as masks or conditions of others."""
    captioned: Counter[bool] = field(default_factory=Counter)
    """Number of samples with a caption, and without one, among those that were listed so far."""
    extra: Sequence[str] = ()
    """Names of the extra fields; a sample without any needs no `extra`."""
    media: str = "image"
    """The name of one sample, in messages."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        for sample in self.each:
            if (turns := sample["conversations"]) is not None:  # not withdrawn
                self.captioned[bool(turns)] += 1
            yield sample

    def behind(self, before: "Samples | None") -> "Samples":
        """Return these samples, with the files of those listed before counted, too."""
        if before is None:
            return self
        self.others.update(before.others)
        self.captioned.update(before.captioned)
        self.masks[:0] = before.masks
        return self

    @property
    def note(self) -> str:
        """One line on files and folders that are not samples; empty if there are none.

        Some sources know them only after all samples are listed.
        """
        return format_skipped(self.listing, self.others, self.media)

    def warnings(self, add_texts: str) -> Iterator[str]:
        """Yield a line on masks that are left out, and one on missing captions, after all samples are listed.

        `add_texts` tells how the source gives samples their texts.
        """
        if self.masks:
            named = f"{counted(len(self.masks), self.media)}: {abridge(self.masks, most=MOST_NAMED)}"
            yield f"left out as masks or conditions of OneTrainer ({' or '.join(MASKS)}), {named}"
        unread = {name: number for name, number in sorted(self.others.items()) if name in TEXT_SUFFIXES}
        files = ", ".join(f"{name} {number:,}" for name, number in unread.items())
        why = ["others have one"] * bool(self.captioned[True])
        why += [f"files that are not read may hold captions ({files})"] * bool(unread)
        if why and (bare := self.captioned[False]):
            remedy = f". {add_texts}" if unread else ""
            yield f"planned without a caption, though {' and '.join(why)}: {counted(bare, 'sample')}{remedy}"


class BadFiles:
    """Collects what is wrong with a source's files, so that one message names all of them."""

    def __init__(self) -> None:
        self._problems, self._numbers = list[str](), count(1)  # threads may share it

    @contextmanager
    def collecting(self) -> Iterator[None]:
        try:
            yield
        except ChangedError:
            raise
        except SourceError as error:
            if next(self._numbers) <= MOST_NAMED:
                self._problems.append(str(error))

    def refuse(self) -> None:
        """Raise SourceError if there were any."""
        total = next(self._numbers) - 1
        if total > 1:
            more = [f"and {total - MOST_NAMED:,} more"] if total > MOST_NAMED else []
            raise SourceError("\n  ".join([f"{total:,} files cannot be used:", *self._problems, *more]))
        if total:
            raise SourceError(self._problems[0])


def is_mask(name: str) -> bool:
    return name.removesuffix(suffix_of(name)).endswith(MASKS)


def format_skipped(listing: Listing, suffixes: Counter[str], media: str = "image") -> str:
    hidden, images = suffixes[HIDDEN], suffixes[OTHER_IMAGE]
    has_heic = media == "image" and {*HEIC} & {*suffixes}
    has_videos = media == "image" and VIDEO_SUFFIXES & {*suffixes}
    parts = [
        suffixes_line(suffixes - Counter({HIDDEN: hidden, OTHER_IMAGE: images}), media),
        f"{counted(hidden, 'hidden file')} (names that begin with a dot)" if hidden else "",
        f"{counted(images, media)} with another extension than source.fields.image" if images else "",
        names_line(listing.not_utf8, "file whose name is not UTF-8", "files whose names are not UTF-8"),
        names_line(listing.linked_folders, "linked folder", "linked folders"),
        names_line(listing.caches, "folder that is a cache", "folders that are caches"),
        "convert HEIC to JPEG or PNG, for example with the package pillow-heif" if has_heic else "",
        "to encode videos, set clip.frames" if has_videos else "",
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


def suffixes_line(suffixes: Counter[str], media: str = "image") -> str:
    """Format as `3 files without an image suffix (.txt 2, .eps 1)`."""
    if not (total := suffixes.total()):
        return ""
    named = sorted((-count, suffix) for suffix, count in suffixes.items() if suffix.startswith("."))[:COMMONEST]
    shown = [f"{suffix} {-count:,}" for count, suffix in named]
    without = suffixes[NO_SUFFIX]
    others = total - without + sum(count for count, _ in named)
    shown += [f"{count:,} {kind}" for count, kind in ((without, NO_SUFFIX), (others, OTHER_SUFFIX)) if count]
    article = "an" if media == "image" else "a"
    return f"{counted(total, 'file')} without {article} {media} suffix ({', '.join(shown)})"


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
