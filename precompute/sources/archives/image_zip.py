"""Images in a zip, stored or deflated, read in place."""

import os
import shlex
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator

from cache_store.errors import SourceError
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import DAMAGED, MISSING, Archive, BoundedReader, refuse_large
from precompute.sources.archives.listing import is_utf8
from precompute.sources.files.file import SourceFile

MAX_INDEX_BYTES = 2**30
"""Of a zip's table of contents: 10 million members."""

MEMBER_MAGIC, END_MAGIC = b"PK\3\4", b"PK\5\6"
"""First bytes of a zip's first member, and of the record at its end that says where its index is."""

INDEX_MAGIC, INDEX_ENTRY, FLAGS_OFFSET = b"PK\1\2", struct.Struct("<8xH18x3H12x"), 8
"""Of an index's entry: its first bytes, then flags and the lengths of name, extra fields and comment."""

UTF8, FALSE_UTF8 = 1 << 11, 1 << 15
"""Flags: the name is UTF-8; and one of our own, at a bit that PKWARE has reserved and zipfile ignores."""

END_BYTES = 22
MAX_END_BYTES = END_BYTES + 2**16
"""Of that record, without a comment and with the longest."""

ZIP64 = 2**32 - 1
"""In that record, of an index that another record says the place of."""

CUT_SHORT = (
    "starts as a zip, but the index at its end is missing: it was cut short or is still being written; "
    "wait for it, copy it again, or save what it holds: {mend}"
)

LOCAL_HEADER_BYTES = 30

READ_COMPRESSIONS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
"""The others pack a gigabyte into a kilobyte, and zipfile unpacks them without a bound; images do not come so."""

OPEN_ERRORS = (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, OverflowError, struct.error)

MEMBER_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError, struct.error)
"""What zipfile raises for members that are cut, damaged, encrypted or made in a way it does not know."""


class ImageZip(Archive[zipfile.ZipInfo]):
    """Images in a zip."""

    def __init__(self, file: SourceFile) -> None:
        try:
            self._zip = ZipReader(file, file.raw, MAX_INDEX_BYTES).open_zip()
        except OPEN_ERRORS as error:
            if isinstance(error, OSError) and error.filename is not None:  # a network's, which is no fault of the zip
                raise
            raise SourceError(f"{file} {zip_problem(file, error)}") from None
        if is_of_a_member(file, self._zip):
            raise SourceError(f"{file} {CUT_SHORT.format(mend=mend(file))}")
        files = [member for member in self._zip.infolist() if not member.filename.endswith("/")]
        super().__init__(file, ((name_of(member), member) for member in files))
        self._misplaced = {member.filename for member in misplaced_members(files, self._zip.start_dir)}

    def fingerprint(self, name: str) -> str:
        member = self.find(name)
        return f"{member.CRC:08x}:{member.file_size}" if member else MISSING

    def read(self, name: str) -> bytes:
        member = self.get(name)
        refuse_large(name, max(member.file_size, member.compress_size))
        if problem := self._problem(member):
            raise Rejected(DAMAGED, f"{name}: {problem}")
        try:
            with self._zip.open(member) as stream:
                data = stream.read(member.file_size + 1)
        except MEMBER_ERRORS as error:
            self._file.refuse_changed()
            raise Rejected(DAMAGED, f"{name}: {error}") from None
        if len(data) != member.file_size:
            raise Rejected(DAMAGED, f"{name}: holds {len(data):,} bytes, claims {member.file_size:,}")
        return data

    def _problem(self, member: zipfile.ZipInfo) -> str | None:
        if stat.S_ISLNK(member.external_attr >> 16):
            return "is a link"
        if member.compress_type not in READ_COMPRESSIONS:
            return f"is compressed by method {member.compress_type}; stored and deflate are read"
        if member.filename in self._misplaced:
            return "shares bytes with other members, or lies outside the archive"
        return None


class ZipReader(BoundedReader):
    """A zip for zipfile, which would refuse all of it for one name that is marked as UTF-8 and is not."""

    _fixes_flags = False

    def open_zip(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self)
        except UnicodeDecodeError:
            self._fixes_flags = True
            archive = zipfile.ZipFile(self)
            self._fixes_flags = False
            return archive

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        return with_true_flags(data) if self._fixes_flags else data


def with_true_flags(index: bytes) -> bytes:
    """Replace the flag UTF8 in a zip's index by FALSE_UTF8 for each name that is not UTF-8."""
    data, place = bytearray(index), 0
    while data[place : place + 4] == INDEX_MAGIC and place + INDEX_ENTRY.size <= len(data):
        flags, *lengths = INDEX_ENTRY.unpack_from(data, place)
        start = place + INDEX_ENTRY.size
        if flags & UTF8 and not is_utf8(os.fsdecode(index[start : start + lengths[0]])):
            struct.pack_into("<H", data, place + FLAGS_OFFSET, flags & ~UTF8 | FALSE_UTF8)
        place = start + sum(lengths)
    return bytes(data)


def name_of(member: zipfile.ZipInfo) -> str:
    """Decode a member's name; bytes that are not the UTF-8 they are marked as become surrogates."""
    is_false = member.flag_bits & (UTF8 | FALSE_UTF8) == FALSE_UTF8
    return os.fsdecode(member.filename.encode("cp437")) if is_false else member.filename


def zip_problem(file: SourceFile, error: Exception) -> str:
    """Say what is wrong with a file that zipfile refuses."""
    head, tail = ends_of(file)
    if 0 <= tail.rfind(END_MAGIC) <= len(tail) - END_BYTES:
        return f"is not a zip that can be read: {error}"
    if head == MEMBER_MAGIC:
        return CUT_SHORT.format(mend=mend(file))
    return f"is {'neither a zip nor a tar' if head else 'empty'}; expected a folder, a zip or a tar of images"


def is_of_a_member(file: SourceFile, archive: zipfile.ZipFile) -> bool:
    """Whether the index that zipfile found is that of a zip in this zip, whose own was cut off: it lies further behind
    than it says, as that of a zip behind a program does, but here a member comes first.
    """
    head, tail = ends_of(file)
    (says,) = struct.unpack_from("<16xL", tail, tail.rfind(END_MAGIC))
    return head == MEMBER_MAGIC and says not in (archive.start_dir, ZIP64)


def ends_of(file: SourceFile) -> tuple[bytes, bytes]:
    """Where a zip says that it is one, and where its index lies."""
    with file.open() as stream:
        head = stream.read(len(MEMBER_MAGIC))
        stream.seek(-min(stream.seek(0, os.SEEK_END), MAX_END_BYTES), os.SEEK_END)
        return head, stream.read()


def mend(file: SourceFile) -> str:
    return shlex.join(["zip", "-FF", str(file), "--out", "mended.zip"])


def misplaced_members(members: list[zipfile.ZipInfo], end: int) -> Iterator[zipfile.ZipInfo]:
    """Members that do not have bytes of their own before `end`: with them, a small zip unpacks to any size."""
    last, last_end = None, 0
    for member in sorted(members, key=lambda member: member.header_offset):
        member_end = member.header_offset + LOCAL_HEADER_BYTES + member.compress_size
        if member.header_offset < 0 or member_end > end:
            yield member
        elif last is not None and member.header_offset < last_end:
            yield from (last, member)
        if last_end < member_end <= end:
            last, last_end = member, member_end
