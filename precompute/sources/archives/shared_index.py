"""Archives' indexes in memory that a build's workers share: read once and held once per machine.

The process that starts workers lends them the indexes of its open archives. A worker that opens the same, unchanged
archive uses the lent index and does not read the archive's table of contents.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from cache_store.storage.protocol import File
from precompute.sources.archives.archive import Archive, ArchiveIndex
from precompute.sources.archives.names import NameColumns
from precompute.sources.archives.tar import ImageTar
from precompute.sources.archives.zip import ImageZip

ALIGNMENT = 64
"""Each array begins at a multiple of this many bytes."""

Arrays = Sequence[NDArray[Any]]

OPEN = WeakValueDictionary[str, Archive[Any]]()
"""Archives that are open in this process, by address and stamp."""

LENT: dict[str, ArchiveIndex] = {}
"""Indexes lent to this process, by address and stamp of their archives."""


def open_indexed(kind: type[ImageTar | ImageZip], file: File) -> ImageTar | ImageZip:
    """Open an archive with the index lent for it, if any; else read its table of contents."""
    key = f"{file}:{file.version.stamp}"
    archive = OPEN[key] = kind(file, LENT.get(key))
    return archive


class SharedArrays:
    """Arrays in nameless shared memory, which is freed with the last process that holds it.

    A process that is started with them as an argument maps the same memory.
    """

    def __init__(self, file: int, layout: Sequence[tuple[str, int]]) -> None:
        """Map an open file; `layout` is each array's dtype and length."""
        self.file, self._layout = file, layout
        memory, start, views = mmap.mmap(file, 0, access=mmap.ACCESS_READ), 0, list[NDArray[Any]]()
        for dtype, length in layout:
            views.append(np.frombuffer(memory, dtype, length, start))
            start = round_up(start + views[-1].nbytes)
        self.arrays = views

    def __del__(self) -> None:
        os.close(self.file)

    def __reduce__(self) -> tuple[Any, ...]:
        return map_received, (DupFd(self.file), self._layout)


def round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def share(arrays: Arrays) -> SharedArrays:
    """Copy arrays of one dimension into shared memory."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("encode-once", os.MFD_CLOEXEC)
    else:  # macOS
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    with open(file, "wb", closefd=False) as stream:
        for each in arrays:
            stream.write(each.data)
            stream.seek(round_up(stream.tell()))
        stream.truncate(max(stream.tell(), 1))
    return SharedArrays(file, [(each.dtype.str, len(each)) for each in arrays])


def map_received(file: Any, layout: Sequence[tuple[str, int]]) -> SharedArrays:
    return SharedArrays(file.detach(), layout)


class LentIndexes:
    """The indexes of this process's open archives, moved to shared memory to send to its workers."""

    def __init__(self) -> None:
        self._each = dict[str, tuple[ArchiveIndex, SharedArrays]]()
        for key, archive in OPEN.items():
            shared = share(arrays_of(archive.index))
            archive.use_index(with_arrays(archive.index, shared.arrays))
            self._each[key] = with_arrays(archive.index, [each[:0] for each in shared.arrays]), shared

    def __reduce__(self) -> tuple[Any, ...]:
        return take_lent, (self._each,)


def take_lent(sent: dict[str, tuple[ArchiveIndex, SharedArrays]]) -> None:
    """Store the indexes that the parent process lends."""
    LENT.update({key: with_arrays(index, shared.arrays) for key, (index, shared) in sent.items()})


def arrays_of(index: ArchiveIndex) -> Arrays:
    return [*index.names, index.rows, index.is_listed, index.is_misplaced]


def with_arrays(index: ArchiveIndex, arrays: Arrays) -> ArchiveIndex:
    """Replace the arrays of an index, in the order of `arrays_of`."""
    *names, rows, is_listed, is_misplaced = arrays
    return index._replace(names=NameColumns(*names), rows=rows, is_listed=is_listed, is_misplaced=is_misplaced)
