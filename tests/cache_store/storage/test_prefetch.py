"""Files at URLs are read ahead of those who need them."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cache_store.errors import CacheError
from cache_store.storage.prefetch import FILES_AHEAD, AnnouncedResults
from cache_store.storage.threads import IN_FLIGHT, map_concurrently, submit


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


def test_after_an_error_no_call_begins_that_has_not():
    """Otherwise a program that fails would first make every request that it had planned."""
    begun, may_end = queue.SimpleQueue[int](), threading.Event()

    def call(number: int) -> None:
        begun.put(number)
        if not number:
            raise CacheError("the first")
        may_end.wait(60)

    with pytest.raises(CacheError):
        map_concurrently(call, range(10 * IN_FLIGHT))
    may_end.set()
    submit(int).result()  # behind all that was planned
    assert begun.qsize() <= IN_FLIGHT + 1
