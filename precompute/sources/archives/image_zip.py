"""Images in a zip, stored or deflated, read in place."""

import os
import shlex
import struct
import zlib
from collections.abc import Iterator

from cache_store.errors import SourceError
from cache_store.storage.verbs import File
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import DAMAGED, MISSING, Archive, ArchiveIndex, index_of, refuse_large
from precompute.sources.archives.zip_index import (
    LOCAL_HEADER_BYTES,
    MAGIC_BYTES,
    MEMBER_MAGIC,
    ROW,
    TAIL_BYTES,
    ZIP64,
    BadIndexError,
    Place,
    ZipMember,
    find_index,
    misplaced_members,
    name_of,
    read_entries,
)

MAX_INDEX_BYTES = 2**30
"""Of a zip's table of contents: 10 million members."""

CUT_SHORT = (
    "starts as a zip, but the index at its end is missing: it was cut short or is still being written; "
    "wait for it, copy it again, or save what it holds: {mend}"
)

STORED, DEFLATED = 0, 8
"""Methods that are read. The others pack a gigabyte into a kilobyte; images do not come so."""

ENCRYPTED, PATCHED, STRONGLY_ENCRYPTED = 1, 1 << 5, 1 << 6
"""Flags."""

LOCAL_HEADER = struct.Struct("<4s2xH18xHH")
"""Of a member: its magic, flags, bytes of its name and of extra fields."""

LOCAL_EXTRA_BYTES = 64
"""Read along with a member, since only its header says how many there are; most have fewer."""


class ImageZip(Archive[ZipMember]):
    """Images in a zip."""

    def __init__(self, file: File, index: ArchiveIndex | None = None) -> None:
        """Read its table of contents, unless the index made of it is given."""
        super().__init__(file, index or read_index(file))

    def _member(self, number: int) -> ZipMember:
        return ZipMember(*ROW.unpack_from(self.index.rows.data, number * ROW.size))

    def fingerprint(self, name: str) -> str:
        member = self.find(name)
        return f"{member.crc:08x}:{member.size}" if member else MISSING

    def read(self, name: str) -> bytes:
        member = self._member(number := self._number(name))
        refuse_large(name, max(member.size, member.packed))
        problem = (
            "shares bytes with other members, or lies outside the archive" if self.index.is_misplaced[number] else ""
        )
        if problem := unreadable(member) or problem:
            raise Rejected(DAMAGED, f"{name}: {problem}")
        return self._whole(name, member, self._packed(name, self._names[number], member))

    def _packed(self, name: str, full_name: str, member: ZipMember) -> bytes:
        """The member's bytes as they lie there."""
        data = self._file.part(
            member.offset, LOCAL_HEADER_BYTES + member.name_bytes + LOCAL_EXTRA_BYTES + member.packed
        )
        if len(data) < LOCAL_HEADER_BYTES:
            raise Rejected(DAMAGED, f"{name}: Truncated file header")
        magic, flags, *lengths = LOCAL_HEADER.unpack_from(data)
        if magic != MEMBER_MAGIC:
            raise Rejected(DAMAGED, f"{name}: Bad magic number for file header")
        said = data[LOCAL_HEADER_BYTES : LOCAL_HEADER_BYTES + lengths[0]]
        if lengths[0] != member.name_bytes or name_of(said, flags) != full_name:
            raise Rejected(DAMAGED, f"{name}: its names in the zip's index and in its header, {said!r}, differ")
        start = LOCAL_HEADER_BYTES + sum(lengths)
        if (stop := start + member.packed) > len(data):
            data += self._file.part(member.offset + len(data), stop - len(data))
        return data[start:stop]

    def _whole(self, name: str, member: ZipMember, data: bytes) -> bytes:
        """No more of it than the index claims."""
        if member.method == DEFLATED:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, max(member.size, 1))
            except zlib.error as error:
                raise Rejected(DAMAGED, f"{name}: {error}") from None
        data = data[: member.size]
        if len(data) != member.size:
            raise Rejected(DAMAGED, f"{name}: holds {len(data):,} bytes, claims {member.size:,}")
        if zlib.crc32(data) != member.crc:
            raise Rejected(DAMAGED, f"{name}: Bad CRC-32")
        return data


def read_index(file: File) -> ArchiveIndex:
    head, tail = ends_of(file)
    try:
        if (place := find_index(tail, file.version.size)) is None:
            raise SourceError(f"{file} {zip_problem(file, head)}")
        refuse_large_index(file, place)
        index = index_of(files_of(file, place))
    except (BadIndexError, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:  # a network's, which is no fault of the zip
            raise
        raise SourceError(f"{file} is not a zip that can be read: {error}") from None
    if is_of_a_member(head, place):
        raise SourceError(f"{file} {zip_problem(file, head)}")
    file.refuse_changed()
    return index._replace(is_misplaced=misplaced_members(index.rows, place.start))


def unreadable(member: ZipMember) -> str | None:
    """Why a member is not read, by its entry alone."""
    if member.is_link:
        return "is a link"
    if member.method not in (STORED, DEFLATED):
        return f"is compressed by method {member.method}; stored and deflate are read"
    if member.flags & PATCHED:
        return "is patched data"
    return "is encrypted" if member.flags & (ENCRYPTED | STRONGLY_ENCRYPTED) else None


def refuse_large_index(file: File, place: Place) -> None:
    if place.size > MAX_INDEX_BYTES:
        needs = f"its table of contents needs {place.size:,} bytes, more than {MAX_INDEX_BYTES:,}"
        raise SourceError(f"{file}: {needs}")


def files_of(file: File, place: Place) -> Iterator[tuple[str, bytes]]:
    return (entry for entry in read_entries(file, place) if not entry[0].endswith("/"))


def zip_problem(file: File, head: bytes) -> str:
    """Say what is wrong with a file that has no index of its own."""
    if head == MEMBER_MAGIC:
        return CUT_SHORT.format(mend=shlex.join(["zip", "-FF", str(file), "--out", "mended.zip"]))
    return f"is {'neither a zip nor a tar' if head else 'empty'}; expected a folder, a zip or a tar of images"


def is_of_a_member(head: bytes, place: Place) -> bool:
    """Whether the index that was found is that of a zip in this zip, whose own was cut off: it lies further behind
    than it says, as that of a zip behind a program does, but here a member comes first.
    """
    return head == MEMBER_MAGIC and place.said not in (place.start, ZIP64)


def ends_of(file: File) -> tuple[bytes, bytes]:
    """Where a zip says that it is one, and where its index lies."""
    with file.reopen() as stream:
        head = stream.read(MAGIC_BYTES)
        stream.seek(-min(stream.seek(0, os.SEEK_END), TAIL_BYTES), os.SEEK_END)
        return head, stream.read()
