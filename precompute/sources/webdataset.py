"""Tars in WebDataset's form, as img2dataset writes them: members of one key are a sample.

`000000012.jpg`, `000000012.txt` and `000000012.json` have the key `000000012`, which is the sample's id. Planning reads
only headers and texts, in the order of the tars.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, BinaryIO, TypeVar

import msgspec

from cache_store.errors import SourceError
from cache_store.format.record import describe_mismatch
from cache_store.messages import counted
from cache_store.storage.prefetch import SharedResults
from cache_store.storage.threads import start_thread
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import Index
from precompute.sources.archives.tar import ImageTar
from precompute.sources.config import FieldNames
from precompute.sources.fields import Conversation, Turn, as_caption, captions_of, conversation_of, read_text
from precompute.sources.image_store import open_archive
from precompute.sources.images import ALL, Names, Source
from precompute.sources.listing import HIDDEN, MASK, NOT_UTF8, BadFiles, Samples, counted_suffix, is_mask
from precompute.sources.media import IMAGES, Media
from precompute.sources.place import MISSING, NOWHERE, Located, Place
from precompute.sources.source_files import SourceFiles

T = TypeVar("T")

SUFFIX = ".tar"

TARS_AHEAD = 4
"""Tars at a URL whose headers are read at the same time; one of 10,000 samples takes some 35 MB."""

TARS_HELD = 16
"""Tars that are open to read images: neighbours in the plan lie in a tar or two."""

KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
"""A member's key, up to the first dot of its last part, and its extension; this is WebDataset's own rule."""

CAPTION_EXTENSION, RECORD_EXTENSION = "txt", "json"


class TextRecord(msgspec.Struct):
    conversations: list[Turn] | None = None
    caption: str | None = None


class WebDatasetSource(Source):
    """Samples of tars; a uri is the tar's name and the member's name."""

    def __init__(self, files: SourceFiles, fields: FieldNames, media: Media = IMAGES) -> None:
        self._files, self._names, self._media = files, frozenset(files.names), media
        self._extension = fields.image and fields.image.lstrip(".").lower()
        self._captions, self._extra = fields.captions or [], fields.extra or []
        self._tar = lru_cache(TARS_HELD)(self._open_tar)
        self._tar(files.names[0])  # report a file that is no tar before a model is loaded

    def version(self, part: Names = ALL) -> str | None:
        return self._files.version(part)

    def parts(self, rows: int) -> Sequence[Names]:
        first = self._files.names[0]
        return self._files.grouped(rows, len(groups_of(self._tar(first).index.places, Counter())))

    def samples(self, part: Names = ALL) -> Samples:
        skipped = self._files.skipped_in(part)
        each = self._samples(part or self._files.names, skipped)
        return Samples(each, skipped, extra=self._extra, media=self._media.name)

    def _samples(self, names: Sequence[str], skipped: Counter[str]) -> Iterator[dict[str, object]]:
        bad = BadFiles()
        for name, tar, index in self._indexed(names, bad):
            skipped.update({NOT_UTF8: index.not_utf8})
            groups = groups_of(index.places, skipped)
            for key, members in groups.items():
                image = self._image(name, key, members)
                if image is None:
                    skipped.update(map(counted_suffix, members.values()))
                    continue
                if is_mask(members[image]):
                    skipped[MASK] += 1
                    continue
                text, record = (beside(image, each, members) for each in (CAPTION_EXTENSION, RECORD_EXTENSION))
                unused = (members[each] for each in {*members} - {image, text, record})
                skipped.update(counted_suffix(each) for each in unused if not self._media.includes(each))
                with bad.collecting():
                    values, fields = read_record(name, tar, record and members[record])
                    captions = captions_of(f"{name}/{key}.json", {each: fields.get(each) for each in self._captions})
                    yield {
                        "id": key,
                        "uri": f"{name}/{members[image]}",
                        "conversations": read_conversation(name, tar, text and members[text], values, captions),
                        "extra": {each: fields.get(each) for each in self._extra},
                        **tar.locate(members[image]).columns(),
                    }
        bad.refuse()

    def _indexed(self, names: Sequence[str], bad: BadFiles) -> Iterator[tuple[str, ImageTar, Index]]:
        """Yield each tar with its headers read; at a URL, the next ones' are being read."""
        tars = SharedResults(self._index_tar, TARS_AHEAD)
        for place, name in enumerate(names):
            if self._files.store.is_remote:
                tars.begin(names[place : place + TARS_AHEAD], start_thread)
            with bad.collecting():
                yield name, *tars.get(name)

    def _image(self, tar: str, key: str, members: Collection[str]) -> str | None:
        """Return the extension of the sample's image, if any; raise SourceError for several."""
        if self._extension is not None:
            return self._extension if self._extension in members else None
        images = [each for each in members if self._media.includes(f"name.{each}")]
        if len(images) > 1:
            several = f"{counted(len(images), self._media.name)} ({', '.join(images)})"
            raise SourceError(
                f"{self._files.where(f'{tar}/{key}')} has {several}; name the extension to encode by "
                "--source.fields.image; or, since a key ends at the first dot of a name, rename the members, or read "
                "the tar as a tree, by --source.kind folder"
            )
        return images[0] if images else None

    def locate(self, name: str) -> Located:
        tar = self._tar_of(name)
        return NOWHERE if tar is None else self._tar(tar).locate(name[len(tar) + 1 :])

    def read(self, name: str, place: Place | None = None) -> bytes:
        return self._in_tar(name, lambda tar, member: tar.read(member, place))

    def read_head(self, name: str, place: Place | None = None) -> bytes:
        return self._in_tar(name, lambda tar, member: tar.read_head(member, place))

    def open(self, name: str, place: Place | None = None) -> BinaryIO:
        return self._in_tar(name, lambda tar, member: tar.open(member, place))

    def _in_tar(self, name: str, read: Callable[[ImageTar, str], T]) -> T:
        if (tar := self._tar_of(name)) is None:
            raise Rejected(MISSING, f"{name} is in no tar of the source")
        return read(self._tar(tar), name[len(tar) + 1 :])

    def _tar_of(self, uri: str) -> str | None:
        slashes = (place for place, letter in enumerate(uri) if letter == "/")
        return next((uri[:place] for place in slashes if uri[:place] in self._names), None)

    def _index_tar(self, name: str) -> tuple[ImageTar, Index]:
        tar = self._open_tar(name)
        return tar, tar.index

    def _open_tar(self, name: str) -> ImageTar:
        try:
            tar = open_archive(file := self._files.open(name))
        except FileNotFoundError:
            where = self._files.where(name)
            raise SourceError(f"{where} is gone; restore it and run the same command again") from None
        if not isinstance(tar, ImageTar):
            raise SourceError(f"{file} is not a tar; kind webdataset reads uncompressed tars")
        return tar


def groups_of(members: Iterable[str], skipped: Counter[str]) -> Mapping[str, dict[str, str]]:
    """Return each key's members by extension, in their order; count the rest, such as `.a.jpg`."""
    groups = dict[str, dict[str, str]]()
    for member in members:
        if found := KEY.fullmatch(member):
            groups.setdefault(found[1], {})[found[2].lower()] = member
        else:
            skipped[HIDDEN if member.rpartition("/")[2].startswith(".") else counted_suffix(member)] += 1
    return groups


def beside(image: str, extension: str, members: Collection[str]) -> str | None:
    """Return the extension of an image's text, None if it has none: `a.v1.5.txt` for `a.v1.5.jpg`, else `a.txt`."""
    parts = image.split(".")[:-1]
    names = (".".join([*parts[:kept], extension]) for kept in range(len(parts), -1, -1))
    return next((each for each in names if each in members), None)


def read_record(tar_name: str, tar: ImageTar, member: str | None) -> tuple[TextRecord, Mapping[str, object]]:
    if member is None:
        return TextRecord(), {}
    data = read_member(tar_name, tar, member)
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
        return msgspec.convert(fields, TextRecord), fields
    except (msgspec.DecodeError, RecursionError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else describe_mismatch(error)
        expected = "expected an object with `caption` or `conversations`"
        raise SourceError(f"{tar_name}/{member}: {problem}; {expected}") from None


def read_conversation(
    tar_name: str, tar: ImageTar, text: str | None, record: TextRecord, captions: list[str]
) -> Conversation:
    """Return the record's conversations, else these captions, else the caption of the `.txt`, else of the record."""
    if record.conversations is not None:
        turns: Conversation = msgspec.to_builtins(record.conversations)
        return turns
    if captions:
        return conversation_of(*captions)
    if text is not None:
        return conversation_of(as_caption(read_member(tar_name, tar, text)))
    return conversation_of(record.caption)


def read_member(tar_name: str, tar: ImageTar, member: str) -> str:
    return read_text(f"{tar_name}/{member}", partial(tar.read, member, tar.locate(member).place))
