"""Tars in WebDataset's form, as img2dataset writes them: members of one key are a sample.

`000000012.jpg`, `000000012.txt` and `000000012.json` have the key `000000012`, which is the sample's id. Planning reads
only headers and texts, in the order of the tars. Only a few tars' indexes are in memory, because neighbours in the plan
lie in one tar.
"""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby

import msgspec
import numpy as np

from cache_store.errors import SourceError
from cache_store.format.record import describe_mismatch
from cache_store.storage.calls import start_thread
from cache_store.storage.prefetch import SharedResults
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import MISSING
from precompute.sources.archives.image_store import open_archive
from precompute.sources.archives.names import HIDDEN, OTHER_IMAGE, ChosenNames, Names, Samples, counted_suffix
from precompute.sources.archives.tar import ImageTar
from precompute.sources.fields import Conversation, FieldNames, Turn, conversation_of, read_caption, read_text
from precompute.sources.folder import is_image
from precompute.sources.source_files import SourceFiles

SUFFIX = ".tar"

TARS_HELD = 4
"""Tars whose indexes are in memory. For 10,000 samples with a text and a JSON each, an index takes about 2 MB, and the
texts some 15 MB while they are planned. At a URL, this many indexes are read at the same time.
"""

MAX_TEXT_BYTES = 16 * 2**20
"""Largest `.txt` or `.json` that is read; img2dataset's take about a kilobyte."""

KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
"""A member's key, up to the first dot of its last part, and its extension; this is WebDataset's own rule."""

CAPTION_EXTENSION, RECORD_EXTENSION = "txt", "json"


class TextRecord(msgspec.Struct):
    """The fields used of a `.json`."""

    conversations: list[Turn] | None = None
    caption: str | None = None


class WebDatasetSource:
    """Samples of tars; a uri is the tar's name and the member's name."""

    def __init__(self, files: SourceFiles, fields: FieldNames) -> None:
        self._files = files
        self.version = files.version
        self._extension = fields.image and fields.image.lstrip(".").lower()
        self._places = {name: place for place, name in enumerate(files.names)}
        self._tars = SharedResults(self._open_tar, TARS_HELD)
        self._tars.get(files.names[0])  # report an unusable tar before a model is loaded

    def samples(self) -> Samples:
        """List the samples in the order of the tars."""
        others, not_utf8 = Counter[str](), [*self._files.listing.not_utf8]
        listing = self._files.listing._replace(not_utf8=not_utf8)
        return Samples(self._samples(others, not_utf8), listing, others, in_rows=True)

    def _samples(self, others: Counter[str], not_utf8: list[str]) -> Iterator[dict[str, object]]:
        for place, name in enumerate(self._files.names):
            self._begin(place, place + TARS_HELD)
            tar = self._tars.get(name)
            not_utf8 += [f"{name}/{member}" for member in tar.not_utf8]
            for key, members in groups_of(tar.names, others):
                image = self._image(f"{name}/{key}", members)
                if image is None:
                    others.update(map(self._unused, members.values()))
                    continue
                unused = {*members} - {image, CAPTION_EXTENSION, RECORD_EXTENSION}
                others.update(counted_suffix(members[each]) for each in unused if not is_image(members[each]))
                yield {
                    "id": key,
                    "uri": f"{name}/{members[image]}",
                    "conversations": read_conversation(name, tar, members),
                    "fingerprint": tar.fingerprint(members[image]),
                }
            tar.drop_texts()

    def _image(self, sample: str, extensions: Iterable[str]) -> str | None:
        """Return the image's extension, None if there is no image; raise SourceError if there are several."""
        if self._extension is not None:
            return self._extension if self._extension in extensions else None
        images = [each for each in extensions if is_image(f"image.{each}")]
        if len(images) > 1:
            raise SourceError(
                f"{self._files.where(sample)} has {len(images)} images ({', '.join(images)}); name the one to encode, "
                f"as with --source.fields.image {images[0]}"
            )
        return images[0] if images else None

    def _unused(self, member: str) -> str:
        """Return the kind under which to count a member of a sample without an image to encode."""
        return OTHER_IMAGE if self._extension is not None and is_image(member) else counted_suffix(member)

    def fingerprint(self, uri: str) -> str:
        found = self._find(uri)
        return MISSING if found is None else found[0].fingerprint(found[1])

    def read(self, uri: str) -> bytes:
        if (found := self._find(uri)) is None:
            raise Rejected(MISSING, f"{uri} is in no tar of the source")
        tar, member = found
        tar.drop_texts()
        return tar.read(member)

    def _find(self, uri: str) -> tuple[ImageTar, str] | None:
        """Return the tar of a uri, and the member's name in it."""
        slashes = (place for place, letter in enumerate(uri) if letter == "/")
        found = next((place for place in slashes if uri[:place] in self._places), None)
        return None if found is None else (self._tar(uri[:found]), uri[found + 1 :])

    def _tar(self, name: str) -> ImageTar:
        """Return a tar; start reading the next one if the one before it is in memory, as in a read in order."""
        place = self._places[name]
        self._begin(place, place + 1)
        if place and self._files.names[place - 1] in self._tars:
            self._begin(place + 1, place + 2)
        return self._tars.get(name)

    def _begin(self, first: int, stop: int) -> None:
        if self._files.store.is_remote:
            self._tars.begin(self._files.names[first:stop], start_thread)

    def _open_tar(self, name: str) -> ImageTar:
        try:
            tar = open_archive(file := self._files.open(name))
        except FileNotFoundError:
            where = self._files.where(name)
            raise SourceError(f"{where} is gone; restore it and run the same command again") from None
        if not isinstance(tar, ImageTar):
            raise SourceError(f"{file} is not a tar; kind webdataset reads uncompressed tars")
        return tar


def groups_of(members: ChosenNames, others: Counter[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each key with its members by extension, in the order of first members; count the rest, such as `.a.jpg`."""
    with_key = array("I")

    def each_key() -> Iterator[str]:
        for place, member in enumerate(members):
            if found := KEY.fullmatch(member):
                with_key.append(place)
                yield found[1]
            else:
                others[HIDDEN if member.rpartition("/")[2].startswith(".") else counted_suffix(member)] += 1

    keys = Names(each_key())
    order = np.argsort(keys.firsts, kind="stable").data
    for first, group in groupby(order, key=keys.firsts.data.__getitem__):
        yield keys[first], {extension_of(member): member for member in (members[with_key[each]] for each in group)}


def extension_of(member: str) -> str:
    found = KEY.fullmatch(member)
    assert found
    return found[2].lower()


def read_conversation(tar_name: str, tar: ImageTar, members: dict[str, str]) -> Conversation:
    """Return the `.json`'s conversations, else the caption of the `.txt`, else of the `.json`; empty without text."""
    record = TextRecord()
    if RECORD_EXTENSION in members:
        data = read_text(*text_member(tar_name, tar, members[RECORD_EXTENSION]))
        try:
            record = msgspec.json.decode(data, type=TextRecord)
        except (msgspec.DecodeError, RecursionError) as error:
            problem = "is nested too deeply" if isinstance(error, RecursionError) else describe_mismatch(error)
            expected = "expected an object with `caption` or `conversations`"
            raise SourceError(f"{tar_name}/{members[RECORD_EXTENSION]}: {problem}; {expected}") from None
    if record.conversations is not None:
        turns: Conversation = msgspec.to_builtins(record.conversations)
        return turns
    if CAPTION_EXTENSION in members:
        return conversation_of(read_caption(*text_member(tar_name, tar, members[CAPTION_EXTENSION])))
    return conversation_of(record.caption)


def text_member(tar_name: str, tar: ImageTar, member: str) -> tuple[str, Callable[[], bytes]]:
    """Return a member's name for errors, and a function that reads it."""
    return f"{tar_name}/{member}", partial(tar.read, member, MAX_TEXT_BYTES)
