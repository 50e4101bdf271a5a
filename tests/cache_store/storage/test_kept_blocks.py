"""Blocks kept in a local folder: bounded, checked, shared by processes, and never needed to read a cache."""

import copy
import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.storage.kept_blocks import KeptStore
from cache_store.storage.protocol import Ranges
from cache_store.storage.store import open_store
from tests.full_disk import largest_file
from tests.memory_store import MemoryStore


def test_what_is_kept_is_not_fetched_again(copied, proxy, tmp_path):
    cache, kept = open_cache(copied[0]), tmp_path / "kept"
    numbers, there = np.arange(len(cache)), open_cache(KeptStore(open_store(copied[1]), kept, 10**9, 1_000))

    def requests() -> int:
        before = len(proxy.requests)
        assert np.array_equal(there.read(numbers), cache.read(numbers))
        return len(proxy.requests) - before

    assert requests() > 0
    assert requests() == 0
    there = copy.copy(there)  # opened anew, as in another process
    assert requests() == cache.spec.num_shards, "one look at each shard tells its version"


@dataclass(frozen=True)
class WatchedBlocks(KeptStore):
    """Records the size of all blocks whenever one is added."""

    sizes: list[int] = field(default_factory=list)

    def _keep(self, key: Any, block: memoryview) -> None:
        super()._keep(key, block)
        self.sizes.append(sum(path.stat().st_size for path in self.folder.glob("*/*.*x1000")))


def test_a_bound_holds_while_it_is_passed_and_for_blocks_alone(tmp_path):
    """In a folder with other files, and in one read of more bytes than the bound."""
    others = [tmp_path / name for name in ("ab/model.bin", "runs/old/weights.bin", f"{'a' * 64}.0x1000", "notes.txt")]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(9_000))
        os.utime(path, (0, 0))
    blocks = WatchedBlocks(
        MemoryStore(dict.fromkeys("ab", bytes(30_000)), dict.fromkeys("ab", 1)), tmp_path, 20_000, 1_000
    )
    found = blocks.fetch([Ranges(name, [0], [30_000], 30_000, name * 64) for name in "ab"])
    assert [bytes(part) for (part,) in found] == [bytes(30_000)] * 2
    assert len(blocks.sizes) == 60
    assert max(blocks.sizes) <= 20_000 * 1.02 + 1_004
    assert all(path.stat().st_size == 9_000 for path in others)


def flip(data):
    return data[:9] + bytes([data[9] ^ 1]) + data[10:]


HARM = {"flipped": flip, "cut": lambda data: data[:-5], "emptied": lambda data: b"", "zeros": lambda data: bytes(4)}


@pytest.mark.parametrize("harm", [*HARM, "a folder", "gone", "full disk", "no folder"])
def test_what_happens_to_kept_blocks_changes_nothing_read(copied, tmp_path, caplog, harm):
    expected, kept = open_cache(copied[0]).read(np.arange(27)), tmp_path / "kept"

    def read() -> str:
        assert np.array_equal(open_cache(copied[1], cache_dir=kept).read(np.arange(27)), expected)
        return "".join(caplog.messages)

    assert read() == ""
    blocks = [path for path in kept.rglob("*") if path.is_file()]
    assert blocks
    for block in blocks:
        data = block.read_bytes()
        block.unlink()
        if harm in HARM:
            block.write_bytes(HARM[harm](data))
        if harm == "a folder":
            block.mkdir()
    if harm == "no folder":
        shutil.rmtree(kept)
        kept.write_bytes(b"")
    with largest_file(100) if harm == "full disk" else nullcontext():
        said = read()
    assert said.startswith("nothing more is kept, ") == (harm in ("a folder", "full disk", "no folder"))
    assert not [*tmp_path.rglob("*.partial")]
