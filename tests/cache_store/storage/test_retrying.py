"""Which requests are repeated, how often, and with which messages, over a store whose failures are chosen."""

import pytest

from cache_store.storage import retrying
from cache_store.storage.retrying import ATTEMPTS, RetryingStore
from tests.memory_store import FailingStore, MemoryStore


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in {"FIRST_PAUSE_S": 0.001, "LONGEST_PAUSE_S": 0.01, "BUSY_S": 0.2, "WARNED_EACH_S": 0}.items():
        monkeypatch.setattr(retrying, name, value)
    retrying.ANSWERED.clear()


def read_from_failing(kind: str, times: int) -> tuple[int, bool]:
    """Read a file; return the number of requests, and whether the read succeeded."""
    store = FailingStore(MemoryStore(), kind, times)
    store.inner.put_whole("file", b"data")
    try:
        RetryingStore(store).read("file")
    except retrying.TransientError:
        return store.failed["read", "file"], False
    return store.failed["read", "file"], True


@pytest.mark.parametrize("kind", ["cut", "conflict", "broken off"])
def test_an_answer_that_was_spoilt_is_asked_for_a_few_times(kind):
    assert read_from_failing(kind, ATTEMPTS - 1) == (ATTEMPTS, True)
    assert read_from_failing("cut", 10**6) == (ATTEMPTS, False)


def test_a_busy_store_is_waited_for_and_a_silent_one_only_if_it_ever_spoke(caplog):
    assert read_from_failing("silent", 1) == (1, False)
    assert read_from_failing("busy", 9) == (10, True)
    assert "the store answers 503 Slow Down: waiting, for up to 0 s more: memory://store/file" in caplog.messages
    caplog.clear()
    assert read_from_failing("silent", 9) == (10, True)
    assert "the store does not answer any more: waiting" in caplog.messages[0]
    count, had = read_from_failing("busy", 10**6)
    assert not had
    assert count > ATTEMPTS
