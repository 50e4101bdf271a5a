"""Images in an uncompressed tar, read in place by offset.

tarfile reads headers of every kind, and only headers: names, offsets and sizes. It trusts them, so its reads are
bounded and its results checked. Headers of plain files, nearly all of them, are read here with one pattern, in a third
of tarfile's time. Small texts are read on the way, because they lie between headers.
"""

import os
import re
import struct
import tarfile
from collections.abc import Iterator
from typing import IO, cast

from cache_store.errors import SourceError
from cache_store.storage.protocol import File
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import (
    DAMAGED,
    MAX_FILE_BYTES,
    MISSING,
    Archive,
    ArchiveIndex,
    TarMember,
    index_of,
    refuse_large,
)
from precompute.sources.archives.names import as_posix

MAX_EXTENDED_HEADER_BYTES = 16 * 2**10
"""Largest extended header that is read: twice the longest path."""

MOST_KEPT_BYTES = 64 * 2**20
"""Bytes of a tar's texts in memory, until they are dropped."""

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

    def text(self, member: TarMember) -> bytes:
        self.seek(member.offset)
        return self._file.read(member.size)


def read_headers(file: File, texts: dict[int, bytes]) -> Iterator[tuple[str, TarMember]]:
    """Yield every member except folders, with its name; raise SourceError if the tar cannot be read to its end.

    Small texts are put into `texts`, by offset.
    """
    left = MOST_KEPT_BYTES
    with file.reopen() as opened:
        stream = TarHeaders(opened)
        try:
            archive = tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r:")  # noqa: SIM115 (nothing to close)
            for name, member in read_members(archive, stream):
                if member.is_small_text(name) and (left := left - member.size - KEPT_COSTS) >= 0:
                    texts[member.offset] = stream.text(member)
                yield name, member
            stream.seek(archive.offset)
            end = stream.read(tarfile.BLOCKSIZE)
        except INDEX_ERRORS as error:
            if isinstance(error, OSError) and error.filename is not None:  # a network error, not a fault of the tar
                raise
            raise SourceError(f"{file} is not a tar that can be read: {error}") from None
    if end != bytes(tarfile.BLOCKSIZE):
        raise SourceError(f"{file} is damaged or cut short at byte {archive.offset:,}: no member and no end mark")
    file.refuse_changed()


def read_members(archive: tarfile.TarFile, stream: TarHeaders) -> Iterator[tuple[str, TarMember]]:
    """Yield every member except folders; raise tarfile's errors at a bad header."""
    position = -1  # tarfile has read the first one as it opened the tar
    while True:
        is_alone = position >= 0 and not archive.pax_headers  # they would apply to this member too
        if is_alone and (found := read_plain(stream, archive.offset)):
            position, archive.offset = archive.offset, blocks_end(found[1])
            yield found
            continue
        if (member := archive.next()) is None:
            return
        archive.members.clear()  # type: ignore[attr-defined]  # it would keep every header
        if member.offset <= position or len(archive.pax_headers) > MAX_GLOBAL_HEADERS:
            raise tarfile.ReadError(f"headers out of order at byte {member.offset:,}")
        position = member.offset
        if not member.isdir():
            yield as_posix(member.name), read_member(member, stream.size)


def read_plain(stream: TarHeaders, offset: int) -> tuple[str, TarMember] | None:
    """Read a plain file's sound header, if the whole file is in the tar; None leaves the header to tarfile."""
    if offset > stream.size:
        raise tarfile.ReadError("unexpected end of data")
    stream.seek(offset)
    header = stream.read(tarfile.BLOCKSIZE)
    if (fields := PLAIN.fullmatch(header)) is None:
        return None
    size, mtime, header_sum = (int(field, 8) for field in fields.groups()[1:])
    found = TarMember(offset + tarfile.BLOCKSIZE, size, mtime, None)
    if header_sum != sum(header) - sum(header[SUM_PLACE]) + sum(b" " * 8) or blocks_end(found) > stream.size:
        return None
    return as_posix(os.fsdecode(fields[1].partition(b"\0")[0])), found


def blocks_end(member: TarMember) -> int:
    return member.offset + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def read_member(member: tarfile.TarInfo, tar_bytes: int) -> TarMember:
    problem = linked_to = None
    if member.islnk():
        linked_to = as_posix(member.linkname)
    elif member.issym():
        problem = "is a link"
    elif not member.isreg():
        problem = "is not a file"
    elif member.issparse():
        problem = "is a sparse file"
    elif member.size < 0 or member.offset_data + member.size > tar_bytes:
        problem = f"claims {member.size:,} bytes, more than the tar has"
    return TarMember(member.offset_data, member.size, member.mtime, problem, linked_to)


MAX_LINKS = 40
"""Most hard links to follow in a row, like Linux's limit for symbolic links; tar itself links to the first name."""

TAR_MAGIC = slice(257, 262), b"ustar"

ROW = struct.Struct("<qqd?")
"""A plain file's offset, size, mtime, and whether the mtime is an integer. Rows of other members are all zeros."""


class ImageTar(Archive[TarMember]):
    """Images in a tar."""

    def __init__(self, file: File, index: ArchiveIndex | None = None) -> None:
        """Read the headers, unless an index made from them is given."""
        self._texts: dict[int, bytes] = {}
        """Small texts, by offset."""
        super().__init__(file, index or read_tar_index(file, self._texts))

    def _member(self, number: int) -> TarMember:
        if found := self.index.others.get(number):
            return found
        offset, size, mtime, is_whole = ROW.unpack_from(self.index.rows.data, number * ROW.size)
        return TarMember(offset, size, int(mtime) if is_whole else mtime, None)

    def fingerprint(self, name: str) -> str:
        """Return size, mtime and the version of the tar itself, because a tar has no checksums of its members."""
        if (found := self.find(name)) is None:
            return MISSING
        member = self._follow_links(found)
        return f"{member.size}:{member.mtime}:{self._file.version.mark}"

    def drop_texts(self) -> None:
        self._texts.clear()

    def read(self, name: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        member = self._follow_links(self._member(self._number(name)))
        if member.problem:
            raise Rejected(DAMAGED, f"{name}: {member.problem}")
        refuse_large(name, member.size, max_bytes)
        if (text := self._texts.get(member.offset)) is not None:
            return text
        return self._file.part(member.offset, member.size)

    def _follow_links(self, member: TarMember) -> TarMember:
        """Follow hard links to the earlier member that holds the file; return any other member as it is."""
        found = member
        for _ in range(MAX_LINKS):
            if found.linked_to is None:
                return found
            target = self.find_exact(found.linked_to)
            if target is None or target.problem or target.offset >= found.offset:
                break
            found = target
        return member._replace(problem="is a link, and not to a file that comes before it in the tar")


def read_tar_index(file: File, texts: dict[int, bytes]) -> ArchiveIndex:
    """Read the headers, and put small texts into `texts`, by offset."""
    others: dict[int, TarMember] = {}

    def packed() -> Iterator[tuple[str, bytes]]:
        for number, (name, member) in enumerate(read_headers(file, texts)):
            if member.is_plain:
                yield name, ROW.pack(member.offset, member.size, member.mtime, isinstance(member.mtime, int))
            else:
                others[number] = member
                yield name, bytes(ROW.size)

    return index_of(packed())._replace(others=others)


def is_tar(name: str, head: bytes) -> bool:
    """Recognise POSIX and GNU tars by their magic, and the oldest tars, which have none, by the suffix `.tar`."""
    place, magic = TAR_MAGIC
    return head[place] == magic or name.lower().endswith(".tar")
