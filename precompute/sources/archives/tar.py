"""Images in an uncompressed tar, read in place by offset.

tarfile reads headers of every kind, and only headers: names, offsets and sizes. It trusts them, so its reads are
bounded and its results checked. Headers of plain files, nearly all of them, are read here with one pattern, in a third
of tarfile's time. Small texts are read on the way, because they lie between headers.
"""

import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, BinaryIO, NamedTuple, cast

from cache_store.errors import SourceError
from cache_store.storage.protocol import File
from precompute.sources.archives.archive import Archive, Index, damaged, unreadable
from precompute.sources.file_part import PartStream
from precompute.sources.listing import as_posix
from precompute.sources.place import DAMAGED, HEADER_BYTES, Place, refuse_large

TEXT_SUFFIXES = (".txt", ".json")

KEPT_TEXT_BYTES = 64 * 2**10
"""Largest text of a tar that is kept in memory until it is read; a sample's text takes a kilobyte."""

MAX_EXTENDED_HEADER_BYTES = 16 * 2**10
"""Largest extended header that is read: twice the longest path."""

MOST_KEPT_BYTES = 64 * 2**20
"""Bytes of a tar's texts in memory, while it is planned."""

KEPT_COSTS = 160
"""Python's overhead in bytes per kept text."""

MAX_GLOBAL_HEADERS = 100
"""Most header fields that apply to all members; tarfile copies them for each member."""

LONG_NUMBER = re.compile(rb"\d{100}")
"""Refused in extended headers: the time of tarfile's own pattern grows with the square of a run of digits."""

PLAIN = re.compile(
    rb"(.{100})(?:[0-7]{7}\0){3}([0-7]{11})[\0 ]([0-7]{11})[\0 ]([0-7]{6})\0 0\0{100}"
    rb"ustar(?:\x0000|  \0).{64}(?:[0-7]{7}\0|\0{8}){2}\0{167}",
    re.DOTALL,
)
"""A plain file's header, as GNU tar and Python write it: name; mode and owner; size; time; checksum; no link."""

SUM_PLACE = slice(148, 156)
"""Place of the header's checksum, in which these bytes themselves count as spaces."""

INDEX_ERRORS = (tarfile.TarError, OSError, ValueError, LookupError, OverflowError, TypeError, RecursionError)
"""Errors that tarfile raises for headers that are truncated, damaged or wrong."""


class TarHeaders:
    """The tar's stream for tarfile: single reads are bounded, because tarfile trusts the lengths in headers."""

    def __init__(self, file: File) -> None:
        self._file, self.size = file, file.version.size
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size < 0:
            raise tarfile.ReadError("a header of negative size")
        if size > MAX_EXTENDED_HEADER_BYTES:
            most = f"{MAX_EXTENDED_HEADER_BYTES:,}"
            raise SourceError(f"{self._file}: its table of contents needs {size:,} bytes, more than {most}")
        data = self._file.read(size)
        if size > tarfile.BLOCKSIZE and LONG_NUMBER.search(data):
            raise tarfile.ReadError("an extended header that is not text")
        return data


class TarMember(NamedTuple):
    """A member as its header says."""

    name: str
    place: Place
    linked_to: str | None = None
    """For a hard link, the name of the member that holds the file's bytes."""

    @property
    def is_small_text(self) -> bool:
        is_text = self.place.size <= KEPT_TEXT_BYTES and self.name.lower().endswith(TEXT_SUFFIXES)
        return is_text and self.place.problem is None and self.linked_to is None


def read_headers(file: File, texts: dict[int, bytes]) -> Iterator[TarMember]:
    """Yield every member except folders; raise SourceError if the tar cannot be read to its end.

    Small texts are put into `texts`, by offset.
    """
    left = MOST_KEPT_BYTES
    with file.reopen() as opened:
        stream = TarHeaders(opened)
        try:
            archive = tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r:")  # noqa: SIM115 (nothing to close)
            for member in read_members(archive, stream):
                if member.is_small_text and (left := left - member.place.size - KEPT_COSTS) >= 0:
                    stream.seek(member.place.offset + tarfile.BLOCKSIZE)
                    texts[member.place.offset] = opened.read(member.place.size)
                yield member
            stream.seek(archive.offset)
            end = stream.read(tarfile.BLOCKSIZE)
        except INDEX_ERRORS as error:
            raise unreadable(file, "tar", error) from None
    if end != bytes(tarfile.BLOCKSIZE):
        raise SourceError(f"{file} is damaged or cut short at byte {archive.offset:,}: no member and no end mark")
    file.refuse_changed()


def read_members(archive: tarfile.TarFile, stream: TarHeaders) -> Iterator[TarMember]:
    """Yield every member except folders; raise tarfile's errors at a bad header."""
    position = -1  # tarfile has read the first one as it opened the tar
    while True:
        is_alone = position >= 0 and not archive.pax_headers  # they would apply to this member too
        if is_alone and (found := read_plain(stream, archive.offset)):
            position, archive.offset = archive.offset, blocks_end(found.place)
            yield found
            continue
        if (member := archive.next()) is None:
            return
        archive.members.clear()  # type: ignore[attr-defined]  # it would keep every header
        if member.offset <= position or len(archive.pax_headers) > MAX_GLOBAL_HEADERS:
            raise tarfile.ReadError(f"headers out of order at byte {member.offset:,}")
        position = member.offset
        if not member.isdir():
            yield read_member(member, stream)


def read_plain(stream: TarHeaders, offset: int) -> TarMember | None:
    """Read a plain file's sound header, if the whole file is in the tar; None leaves the header to tarfile."""
    if offset > stream.size:
        raise tarfile.ReadError("unexpected end of data")
    stream.seek(offset)
    header = stream.read(tarfile.BLOCKSIZE)
    if (fields := PLAIN.fullmatch(header)) is None:
        return None
    size, _, header_sum = (int(field, 8) for field in fields.groups()[1:])
    place = Place(offset=offset, length=size, size=size, crc32=zlib.crc32(header))
    if header_sum != sum(header) - sum(header[SUM_PLACE]) + sum(b" " * 8) or blocks_end(place) > stream.size:
        return None
    return TarMember(as_posix(os.fsdecode(fields[1].partition(b"\0")[0])), place)


def blocks_end(place: Place) -> int:
    return place.offset + (1 + -(-place.size // tarfile.BLOCKSIZE)) * tarfile.BLOCKSIZE


def read_member(member: tarfile.TarInfo, stream: TarHeaders) -> TarMember:
    name, offset = as_posix(member.name), member.offset_data - tarfile.BLOCKSIZE
    problem = linked_to = None
    if member.islnk():
        linked_to = as_posix(member.linkname)
    elif member.issym():
        problem = "is a link"
    elif not member.isreg():
        problem = "is not a file"
    elif member.issparse():
        problem = "is a sparse file"
    elif member.size < 0 or member.offset_data + member.size > stream.size:
        problem = f"claims {member.size:,} bytes, more than the tar has"
    if problem:
        return TarMember(name, Place(offset=offset, problem=f"{DAMAGED}: {name}: {problem}"))
    stream.seek(offset)
    header = zlib.crc32(stream.read(tarfile.BLOCKSIZE))
    return TarMember(name, Place(offset=offset, length=member.size, size=member.size, crc32=header), linked_to)


TAR_MAGIC = slice(257, 262), b"ustar"


class ImageTar(Archive):
    """Images in a tar."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        self._texts: dict[int, bytes] = {}
        """Small texts that were read with the headers, by offset."""
        self._links: dict[str, tuple[str, int]] = {}
        """Hard links, in order: the name that each links to, and its own offset."""

    def _members(self) -> Iterable[tuple[str, Place]]:
        for name, place, linked_to in read_headers(self._file, self._texts):
            if linked_to is not None:
                self._links[name] = linked_to, place.offset
            yield name, place

    def _indexed(self) -> Index:
        """Give each hard link the place of the earlier member that holds the file, perhaps a link too."""
        index = super()._indexed()
        for name, (linked_to, offset) in self._links.items():
            target, link = index.places.get(linked_to), index.places.get(name)
            if link is None or link.problem:
                continue
            if target is None or target.problem or target.offset >= offset:
                problem = f"{DAMAGED}: {name}: is a link, and not to a file that comes before it in the tar"
                target = Place(problem=problem)
            index.places[name] = target
        return index

    def _fingerprint(self, place: Place) -> str:
        """Return the header's CRC-32, which covers size and time, and the version of the tar itself."""
        return f"{super()._fingerprint(place)}:{self._file.version.mark}"

    def _read_at(self, name: str, place: Place) -> bytes:
        refuse_large(name, place.size)
        if (text := self._texts.get(place.offset)) is not None:
            return text
        data = self._file.part(place.offset, tarfile.BLOCKSIZE + place.size)
        if zlib.crc32(data[: tarfile.BLOCKSIZE]) != place.crc32 or len(data) != tarfile.BLOCKSIZE + place.size:
            raise damaged(name, f"its header is not at byte {place.offset:,}")
        return data[tarfile.BLOCKSIZE :]

    def open(self, name: str, place: Place | None = None) -> BinaryIO:
        """Open a member as a stream, in place; raise Rejected if it is not where it was planned."""
        if place is None or place.problem:
            return io.BytesIO(self.read(name, place))  # raises what the index says of it
        if zlib.crc32(self._file.part(place.offset, tarfile.BLOCKSIZE)) != place.crc32:
            return io.BytesIO(self.read(name, place))  # the tar was written again
        return PartStream(self._file, place.offset + tarfile.BLOCKSIZE, place.size)

    def _head_at(self, name: str, place: Place) -> bytes:
        return self._file.part(place.offset + tarfile.BLOCKSIZE, min(place.size, HEADER_BYTES))


def is_tar(name: str, head: bytes) -> bool:
    """Recognise POSIX and GNU tars by their magic, and the oldest tars, which have none, by the suffix `.tar`."""
    place, magic = TAR_MAGIC
    return head[place] == magic or name.lower().endswith(".tar")
