"""Reading files at URLs ahead: equal bytes, in few requests, and few bytes that nobody needs."""

import io
import queue
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from cache_store.errors import CacheError
from cache_store.storage.prefetch import (
    BLOCK_BYTES,
    FILES_AHEAD,
    STREAM_BYTES,
    AnnouncedResults,
    PartReader,
    PartStream,
)

FILE = random.Random(0).randbytes(12 * 2**20 + 345)


class Requests:
    """Answers requests and records how many bytes each had."""

    def __init__(self, failing: range = range(0)) -> None:
        self.sizes: list[int] = []
        self._failing = failing

    def fetch(self, start: int, stop: int) -> bytes:
        assert 0 <= start < stop <= len(FILE)
        self.sizes.append(stop - start)
        if len(self.sizes) in self._failing:
            raise OSError(5, "made by the test", "a file")
        return FILE[start:stop]


GAPS = {"none": 0, "texts": 3_000, "images": 90_000, "large images": 300_000, "as long as a block": BLOCK_BYTES}


def stream_over(requests: Requests) -> io.BufferedReader:
    return io.BufferedReader(PartStream(PartReader(len(FILE), requests.fetch)), STREAM_BYTES)


@pytest.mark.parametrize("name", GAPS)
def test_a_file_is_skimmed_in_few_requests(name):
    requests = Requests()
    with stream_over(requests) as stream:
        starts = range(0, len(FILE), 512 + GAPS[name])
        for start in starts:
            stream.seek(start)
            assert stream.read(512) == FILE[start : start + 512]
        assert (stream.seek(-8, io.SEEK_END), stream.read()) == (len(FILE) - 8, FILE[-8:])
    if GAPS[name] >= 300_000:
        assert sum(requests.sizes) < len(FILE) / 3
        assert len(requests.sizes) <= 2 * len(starts)
    else:
        assert sum(requests.sizes) <= 1.05 * len(FILE)
        assert len(requests.sizes) < 20


def test_what_is_read_back_and_forth_is_the_same():
    stream, choose = stream_over(Requests()), random.Random(1)
    for _ in range(200):
        start, length = choose.randrange(len(FILE) + 10), choose.randrange(1, 50_000)
        stream.seek(start)
        assert stream.read(length) == FILE[start : start + length]


def test_neighbours_share_blocks_and_others_cost_themselves():
    size = 40_000
    parts = [(start, min(start + size, len(FILE))) for start in range(0, len(FILE), size + 2_000)]
    for order, most_requests, most_bytes in (("near", 15, 1.1 * len(FILE)), ("far", 20, 20 * size)):
        requests = Requests()
        file = PartReader(len(FILE), requests.fetch)
        asked = parts if order == "near" else [parts[number * 37 % len(parts)] for number in range(20)]
        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(lambda part, file=file: file.part(*part), asked)] == [
                FILE[slice(*part)] for part in asked
            ]
        assert len(requests.sizes) <= most_requests
        assert sum(requests.sizes) <= most_bytes


def test_a_block_that_failed_is_asked_for_again():
    requests = Requests(failing=range(6, 12))
    file, asked = PartReader(len(FILE), requests.fetch), [*range(0, len(FILE), 100_000)]
    failed = 0
    while asked:
        try:
            assert file.part(asked[0], asked[0] + 50_000) == FILE[asked[0] : asked[0] + 50_000]
            asked.pop(0)
        except OSError:
            failed += 1
    assert 1 <= failed <= 6


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
