"""Images in an uncompressed tar, read in place by offset.

Texts are read with its headers, since they lie between them.
"""

import struct
from collections.abc import Iterator

from cache_store.storage.verbs import File
from precompute.images.rejected import Rejected
from precompute.sources.archives.archive import (
    DAMAGED,
    MAX_FILE_BYTES,
    MISSING,
    Archive,
    ArchiveIndex,
    index_of,
    refuse_large,
)
from precompute.sources.archives.tar_index import TarMember, read_index

MAX_LINKS = 40
"""From one name of a file to the next, as Linux follows symbolic links; tar itself links to the first."""

TAR_MAGIC = slice(257, 262), b"ustar"

ROW = struct.Struct("<qqd?")
"""Of a plain file: place, bytes, time, whether that is a whole number. All bits of the others are 0."""


class ImageTar(Archive[TarMember]):
    """Images in a tar."""

    def __init__(self, file: File, index: ArchiveIndex | None = None) -> None:
        """Read its headers, unless the index made of them is given."""
        self._texts: dict[int, bytes] = {}
        """By offset."""
        super().__init__(file, index or index_of_tar(file, self._texts))

    def _member(self, number: int) -> TarMember:
        if found := self.index.others.get(number):
            return found
        offset, size, mtime, is_whole = ROW.unpack_from(self.index.rows.data, number * ROW.size)
        return TarMember(offset, size, int(mtime) if is_whole else mtime, None)

    def fingerprint(self, name: str) -> str:
        """With the time of the tar itself: unlike a zip, it has no checksum of its members."""
        if (found := self.find(name)) is None:
            return MISSING
        member = self._followed(found)
        return f"{member.size}:{member.mtime}:{self._file.version.mark}"

    def drop_texts(self) -> None:
        self._texts.clear()

    def read(self, name: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        member = self._followed(self._member(self._number(name)))
        if member.problem:
            raise Rejected(DAMAGED, f"{name}: {member.problem}")
        refuse_large(name, member.size, max_bytes)
        if (text := self._texts.get(member.offset)) is not None:
            return text
        return self._file.part(member.offset, member.size)

    def _followed(self, member: TarMember) -> TarMember:
        """The member itself or, of a hard link, the earlier member that holds the file, as links before it may say."""
        found = member
        for _ in range(MAX_LINKS):
            if found.linked_to is None:
                return found
            target = self.exact(found.linked_to)
            if target is None or target.problem or target.offset >= found.offset:
                break
            found = target
        return member._replace(problem="is a link, and not to a file that comes before it in the tar")


def index_of_tar(file: File, texts: dict[int, bytes]) -> ArchiveIndex:
    """Read the headers, and small texts on the way, which are kept by offset."""
    others: dict[int, TarMember] = {}

    def packed() -> Iterator[tuple[str, bytes]]:
        for number, (name, member) in enumerate(read_index(file, texts)):
            if member.is_plain:
                yield name, ROW.pack(member.offset, member.size, member.mtime, isinstance(member.mtime, int))
            else:
                others[number] = member
                yield name, bytes(ROW.size)

    return index_of(packed())._replace(others=others)


def is_tar(name: str, head: bytes) -> bool:
    """By the magic of POSIX and GNU tars, or by the name: the oldest tars have no magic."""
    place, magic = TAR_MAGIC
    return head[place] == magic or name.lower().endswith(".tar")
