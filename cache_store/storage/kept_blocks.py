"""Blocks of files of an object store, kept in a folder of this machine: bounded, checked, shared by its processes.

Whatever else lies in the folder is neither counted nor touched.

A block is kept under the SHA-256 of the whole file that it is of, as the file's record says it, and its place in it: a
cache that was replaced, or lies in two places, is never mixed up. Each is behind its crc32; one that does not match is
fetched again. Where the folder cannot be used, a line says so and the store is read all the same.
"""

import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cache_store.log import log_warning
from cache_store.storage.files import SCRATCH_SUFFIX, scratch_of, unused_attempt

BLOCK_BYTES = 128 << 10
"""Some samples; each that is read costs so much reading and hashing here, and at first so much of the network."""

CRC_BYTES = 4

UNSEEN_SHARE = 0.02
"""Of the bound: so much a process adds before it looks through the folder again."""

FREED_SHARE = 0.1
"""Of the bound, each time it is passed: the blocks that were used the longest ago."""

NAME = re.compile(r"[0-9a-f]{64}\.\d+x\d+")
"""Of a block: its file's SHA-256, its number and the size of all; in a folder of the first two digits."""

LEAST_BYTES = 10 * BLOCK_BYTES
"""A bound of less would be passed with nearly every block, and all be deleted before it is read again."""


class Ranges(NamedTuple):
    """Parts of one file, and, where it is known, the size and SHA-256 of the whole."""

    name: str
    starts: Sequence[int]
    lengths: Sequence[int]
    size: int = 0
    sha256: str = ""


Fetch = Callable[[Sequence[Ranges]], Sequence[Sequence[memoryview]]]
Key = tuple[str, int]
"""A file's SHA-256, and a block's number within it."""


@dataclass(frozen=True)
class KeptBlocks:
    """A folder of at most some `max_bytes` of blocks, which is looked through rarely."""

    folder: Path
    max_bytes: int
    unseen: dict[int, int] = field(default_factory=dict, compare=False)
    """By process, whose first look is at its first miss: bytes that it has added since it last looked."""
    told: set[int] = field(default_factory=set, compare=False)
    """Processes that have said that nothing can be kept."""

    def fetch(self, wanted: Sequence[Ranges], fetch: Fetch) -> list[list[memoryview]]:
        """Parts of files, from blocks that are kept, or are fetched and then kept."""
        files = {each.sha256: each for each in wanted}
        needed = sorted({(each.sha256, number) for each in wanted for number in blocks_of(each)})
        sizes = {key: block_range(files[key[0]], key[1]).lengths[0] for key in needed}
        held = {key: block for key in needed if (block := self._read(key, sizes[key])) is not None}
        missing = [key for key in needed if key not in held]
        asked = [block_range(files[sha256], number) for sha256, number in missing]
        for key, (block,) in zip(missing, fetch(asked), strict=True):
            held[key] = block
        if missing:
            with self._telling():
                for key in missing:
                    self._keep(key, held[key])
                    self._make_room(len(held[key]))
        return [
            [part(held, each.sha256, *place) for place in zip(each.starts, each.lengths, strict=True)]
            for each in wanted
        ]

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Say, once in each process, that nothing more is kept: the disk is full, or not ours to write to."""
        try:
            yield
        except OSError as error:
            if os.getpid() not in self.told:
                self.told.add(os.getpid())
                why = error.strerror or error
                log_warning(f"nothing more is kept, the store is read instead: {why}: {self.folder}")

    def _path(self, key: Key) -> Path:
        sha256, number = key
        return self.folder / sha256[:2] / f"{sha256}.{number}x{BLOCK_BYTES}"

    def _read(self, key: Key, length: int) -> memoryview | None:
        """None where it is not kept, or is damaged."""
        path = self._path(key)
        with suppress(OSError):
            data = memoryview(path.read_bytes())
            block, checksum = data[:-CRC_BYTES], data[-CRC_BYTES:]
            if len(block) == length and bytes(checksum) == crc_bytes(block):
                with suppress(OSError):  # of a folder that may only be read
                    os.utime(path)
                return block
        return None

    def _keep(self, key: Key, block: memoryview) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{unused_attempt()}{SCRATCH_SUFFIX}")
        try:
            with scratch.open("wb") as stream:
                stream.write(block)
                stream.write(crc_bytes(block))
            with suppress(FileNotFoundError):  # another process has made room
                scratch.replace(path)
        finally:
            with suppress(OSError):
                scratch.unlink()

    def _make_room(self, added: int) -> None:
        """Look through the folder once so much was added that it matters; other processes may be doing so too."""
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
        """When each block was used last, its bytes, and where it lies; scratch files of killed processes too."""
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
            if NAME.fullmatch(scratch_of(path.name) or path.name):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    yield status.st_mtime_ns, status.st_size, path


def blocks_of(wanted: Ranges) -> set[int]:
    """Numbers of the blocks that hold these parts."""
    pairs = zip(wanted.starts, wanted.lengths, strict=True)
    return {
        number
        for start, length in pairs
        for number in range(start // BLOCK_BYTES, (start + length - 1) // BLOCK_BYTES + 1)
    }


def block_range(file: Ranges, number: int) -> Ranges:
    start = number * BLOCK_BYTES
    return Ranges(file.name, [start], [min(BLOCK_BYTES, file.size - start)])


def part(held: dict[Key, memoryview], sha256: str, start: int, length: int) -> memoryview:
    """Bytes of a file, of one block or of several that follow each other."""
    pieces, end = [], start + length
    for number in range(start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1):
        first = number * BLOCK_BYTES
        pieces.append(held[sha256, number][max(0, start - first) : end - first])
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def crc_bytes(block: memoryview) -> bytes:
    return zlib.crc32(block).to_bytes(CRC_BYTES, "little")
