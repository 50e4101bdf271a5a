"""Keep blocks of a remote store's files in a local folder of bounded size, which processes can share.

A block's name is a recorded SHA-256 and its number in the file, so that a replaced cache is never confused. A crc32
follows each block; one that does not match is fetched again. If the folder cannot be used, a message says so and the
store is read directly. Other files in the folder are neither counted nor changed.
"""

import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cache_store.log import log_warning
from cache_store.storage.protocol import Ranges
from cache_store.storage.publish import scratch_beside, scratch_target, unused_attempt
from cache_store.storage.wrapped import WrappedStore

BLOCK_BYTES = 128 << 10
"""Bytes of a block, which holds a few samples: a whole block is fetched and checked to read one of them."""

CRC_BYTES = 4

UNSEEN_SHARE = 0.02
"""Share of the bound that a process may add before it scans the folder again."""

FREED_SHARE = 0.1
"""Share of the bound that is freed when the bound is exceeded; the least recently used blocks are deleted."""

NAME = re.compile(r"[0-9a-f]{64}\.\d+x\d+")
"""Name of a block: its file's SHA-256, its number and the block size; its folder is named by the first two digits."""

LEAST_BYTES = 10 * BLOCK_BYTES
"""Least bound: with a smaller one, almost every new block would delete others before they are read again."""

Key = tuple[str, int]
"""A file's SHA-256, and a block's number within it."""


@dataclass(frozen=True)
class KeptStore(WrappedStore):
    """A store that keeps blocks of the files whose SHA-256 is known, in a folder of about `max_bytes` at most."""

    folder: Path
    max_bytes: int
    block_bytes: int = BLOCK_BYTES
    unseen: dict[int, int] = field(default_factory=dict, compare=False)
    """Bytes that each process has added since it last scanned the folder; it first scans at its first miss."""
    warned_processes: set[int] = field(default_factory=set, compare=False)
    """Processes that have printed that nothing more is kept."""

    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        """Return ranges of files from kept blocks; missing blocks are fetched and then kept."""
        if not all(each.sha256 for each in wanted):
            return self.inner.fetch(wanted)
        files = {each.sha256: each for each in wanted}
        needed = sorted({(each.sha256, number) for each in wanted for number in self._blocks_of(each)})
        sizes = {key: self._block(files[key[0]], key[1]).lengths[0] for key in needed}
        held = {key: block for key in needed if (block := self._read_block(key, sizes[key])) is not None}
        missing = [key for key in needed if key not in held]
        asked = [self._block(files[sha256], number) for sha256, number in missing]
        for key, (block,) in zip(missing, self.inner.fetch(asked), strict=True):
            held[key] = block
        if missing:
            with self._warning_once():
                for key in missing:
                    self._keep(key, held[key])
                    self._make_room(len(held[key]))
        return [
            [self._cut(held, each.sha256, *span) for span in zip(each.starts, each.lengths, strict=True)]
            for each in wanted
        ]

    def _blocks_of(self, wanted: Ranges) -> Iterator[int]:
        for start, length in zip(wanted.starts, wanted.lengths, strict=True):
            yield from range(start // self.block_bytes, (start + length - 1) // self.block_bytes + 1)

    def _block(self, file: Ranges, number: int) -> Ranges:
        start = number * self.block_bytes
        return Ranges(file.name, [start], [min(self.block_bytes, file.size - start)])

    def _cut(self, held: dict[Key, memoryview], sha256: str, start: int, length: int) -> memoryview:
        pieces, end = [], start + length
        for number in range(start // self.block_bytes, (end - 1) // self.block_bytes + 1):
            first = number * self.block_bytes
            pieces.append(held[sha256, number][max(0, start - first) : end - first])
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    @contextmanager
    def _warning_once(self) -> Iterator[None]:
        """Print once per process that nothing more is kept, in place of an OSError such as that of a full disk."""
        try:
            yield
        except OSError as error:
            if os.getpid() not in self.warned_processes:
                self.warned_processes.add(os.getpid())
                why = error.strerror or error
                log_warning(f"nothing more is kept, the store is read instead: {why}: {self.folder}")

    def _path(self, key: Key) -> Path:
        sha256, number = key
        return self.folder / sha256[:2] / f"{sha256}.{number}x{self.block_bytes}"

    def _read_block(self, key: Key, length: int) -> memoryview | None:
        """Return a kept block; None if it is missing or damaged."""
        path = self._path(key)
        with suppress(OSError):
            data = memoryview(path.read_bytes())
            block, checksum = data[:-CRC_BYTES], data[-CRC_BYTES:]
            if len(block) == length and bytes(checksum) == crc_bytes(block):
                with suppress(OSError):  # the folder may be read-only
                    os.utime(path)
                return block
        return None

    def _keep(self, key: Key, block: memoryview) -> None:
        path = self._path(key)
        with (
            suppress(FileNotFoundError),  # another process has deleted the scratch file to make room
            scratch_beside(path, unused_attempt(), sync=lambda descriptor: None) as scratch,
        ):
            scratch.write_bytes(b"".join((block, crc_bytes(block))))
            scratch.replace(path)

    def _make_room(self, added: int) -> None:
        """Delete old blocks beyond the bound, as other processes may; scan only after enough was added."""
        process = os.getpid()
        unseen = self.unseen.get(process, self.max_bytes) + added
        if unseen <= UNSEEN_SHARE * self.max_bytes:
            self.unseen[process] = unseen
            return
        self.unseen[process] = 0
        used = [*self._by_time()]
        total = sum(size for _, size, _ in used)
        if total <= self.max_bytes:
            return
        for _, size, path in sorted(used):
            path.unlink(missing_ok=True)
            total -= size
            if total <= (1 - FREED_SHARE) * self.max_bytes:
                return

    def _by_time(self) -> Iterator[tuple[int, int, Path]]:
        """Yield last use, size and path of blocks, and of scratch files that killed processes left."""
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
            if NAME.fullmatch(scratch_target(path.name) or path.name):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    yield status.st_mtime_ns, status.st_size, path


def crc_bytes(block: memoryview) -> bytes:
    return zlib.crc32(block).to_bytes(CRC_BYTES, "little")
