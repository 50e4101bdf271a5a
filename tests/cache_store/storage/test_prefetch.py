"""Files at URLs are read ahead of those who need them."""

import queue
from concurrent.futures import ThreadPoolExecutor

import pytest

from cache_store.errors import CacheError
from cache_store.storage.prefetch import FILES_AHEAD, AnnouncedResults


def test_expected_files_are_read_ahead_a_few_and_each_once():
    """By several threads; names that were not announced are read by `get`, which also raises errors."""
    names = [f"{number}.jpg" for number in range(5 * FILES_AHEAD)]
    asked = queue.SimpleQueue[str]()

    def read(name: str) -> bytes:
        asked.put(name)
        if name == names[7]:
            raise CacheError(name)
        return name.encode()

    reads = AnnouncedResults(read)
    for start in range(0, len(names), 40):
        reads.expect([*names[start : start + 40], names[start]])
    assert {asked.get(timeout=60) for _ in range(FILES_AHEAD)} == {*names[:FILES_AHEAD]}
    assert asked.empty()
    with pytest.raises(CacheError):
        reads.get(names[7])
    with ThreadPoolExecutor(4) as pool:
        others = [name for name in names if name != names[7]]
        assert [*pool.map(reads.get, reversed(others))] == [name.encode() for name in reversed(others)]
    assert reads.get("other.jpg") == b"other.jpg"
    assert asked.qsize() <= len(names) - FILES_AHEAD + 1 + 4, "but for a name that a list has twice"
