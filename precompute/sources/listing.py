"""The files that a source lists: their names, and counts of those that are no samples."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from cache_store.errors import ChangedError, SourceError
from cache_store.messages import counted
from precompute.clips.opened import SUFFIXES as VIDEO_SUFFIXES

NO_SUFFIX, HIDDEN, NOT_UTF8 = "without a suffix", "hidden, by a dot", "with a name that is not UTF-8"
LINKED, CACHE = "linked folder", "folder that is a cache"
MASK = "OneTrainer's mask or condition"
"""Kinds of skipped files that are not counted by suffix."""

MASKS = ("-masklabel", "-condlabel")
"""Ends of the names of OneTrainer's masks and condition images, which lie beside their images."""

TEXT_SUFFIXES = frozenset({".txt", ".caption", ".json", ".jsonl", ".csv"})
"""Suffixes of files that may hold captions, of other trainers too."""

HEIC = frozenset({".heic", ".heif", ".hif"})

MOST_NAMED = 10
"""Files or kinds that a message names before it says how many more there are."""

NOT_POSIX = re.compile(r"\A\Z|\A\./|//|/\./|/\.?\Z")
"""Matches a name that is not in normal form, in a fifth of the time of parsing it."""


def as_posix(name: str) -> str:
    """Return the normal form of a name: `./a//b` becomes `a/b`."""
    return PurePosixPath(name).as_posix() if NOT_POSIX.search(name) else name


def is_mac_metadata(name: str) -> bool:
    """Return whether a file is macOS metadata: attributes of a file, or a folder's view."""
    if "._" not in name and "__MACOSX" not in name and ".DS_Store" not in name:  # fast path for nearly all names
        return False
    *folders, last = PurePosixPath(name).parts or ("",)
    return last.startswith("._") or last == ".DS_Store" or "__MACOSX" in folders


def is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def suffix_of(name: str) -> str:
    """Return `PurePosixPath(name).suffix`, five times as fast."""
    stem, dot, suffix = name.rpartition("/")[2].rpartition(".")
    return dot + suffix if stem and suffix else ""


def counted_suffix(name: str) -> str:
    return suffix_of(name).lower() or NO_SUFFIX


def is_mask(name: str) -> bool:
    return name.removesuffix(suffix_of(name)).endswith(MASKS)


class Listing(NamedTuple):
    names: Mapping[str, None]
    """Files whose names are UTF-8, sorted."""
    skipped: Counter[str]


@dataclass(frozen=True)
class Samples:
    """A source's samples (id, uri, conversations, fingerprint, place, extra fields), in an order that stays the same.

    Counts of other files are complete once all samples are listed.
    """

    each: Iterable[dict[str, object]]
    skipped: Counter[str] = field(default_factory=Counter)
    captioned: Counter[bool] = field(default_factory=Counter)
    """Number of samples with a caption, and without one, among those that were listed so far."""
    extra: Sequence[str] = ()
    """Names of the extra fields; a sample without any needs no `extra`."""
    media: str = "image"

    def __iter__(self) -> Iterator[dict[str, object]]:
        for sample in self.each:
            if (turns := sample["conversations"]) is not None:  # not withdrawn
                self.captioned[bool(turns)] += 1
            yield sample

    def behind(self, before: "Samples | None") -> "Samples":
        """Count the files of samples listed before, too."""
        if before is not None:
            self.skipped.update(before.skipped)
            self.captioned.update(before.captioned)
        return self

    @property
    def note(self) -> str:
        """One line on files and folders that are not samples, or nothing."""
        ordered = sorted((+self.skipped).items(), key=lambda each: (-each[1], each[0]))
        shown = [f"{kind} {number:,}" for kind, number in ordered[:MOST_NAMED]]
        shown += [f"others {sum(number for _, number in ordered[MOST_NAMED:]):,}"] * (len(ordered) > MOST_NAMED)
        found = {*self.skipped} if self.media == "image" else set()
        advice = ["; convert HEIC to JPEG or PNG, for example with the package pillow-heif"] * bool(HEIC & found)
        advice += ["; to encode videos, set clip.frames"] * bool(VIDEO_SUFFIXES & found)
        return f"skipped, as no {self.media}s: {', '.join(shown)}{''.join(advice)}" if shown else ""

    def warnings(self, add_texts: str) -> Iterator[str]:
        """Yield a line on missing captions, if others have one or files that are not read may hold them."""
        files = ", ".join(f"{name} {self.skipped[name]:,}" for name in sorted(TEXT_SUFFIXES & {*self.skipped}))
        why = ["others have one"] * bool(self.captioned[True])
        why += [f"files that are not read may hold captions ({files})"] * bool(files)
        if why and (bare := self.captioned[False]):
            remedy = f". {add_texts}" if files else ""
            yield f"planned without a caption, though {' and '.join(why)}: {counted(bare, 'sample')}{remedy}"


class BadFiles:
    """Collects the problems of a source's files, for several threads, so that one message names all of them."""

    def __init__(self) -> None:
        self._problems = list[str]()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        try:
            yield
        except ChangedError:
            raise
        except SourceError as error:
            self._problems.append(str(error))

    def refuse(self) -> None:
        problems, total = sorted(self._problems), len(self._problems)
        if total > 1:
            more = [f"and {total - MOST_NAMED:,} more"] if total > MOST_NAMED else []
            raise SourceError("\n  ".join([f"{total:,} files cannot be used:", *problems[:MOST_NAMED], *more]))
        if problems:
            raise SourceError(problems[0])
