"""Which requests are repeated, how often, and with which messages."""

import pytest

from cache_store.storage import retry
from cache_store.storage.retry import ATTEMPTS, TransientError, repeat, transient_error
from tests.named import assert_names

BUCKET = "s3://bucket"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    values = {"FIRST_PAUSE_S": 0.001, "LONGEST_PAUSE_S": 0.01, "PATIENCE_S": 1.0, "WARNED_EACH_S": 0}
    for name, value in values.items():
        monkeypatch.setattr(retry, name, value)
    retry.ANSWERED.clear()


def repeat_failing(times: int, status: str = "", *, is_away: bool = False) -> tuple[int, bool]:
    """Repeat a request that fails at first; return how often it was made, and whether it succeeded."""
    made = 0

    def request() -> None:
        nonlocal made
        made += 1
        if made <= times:
            raise transient_error(OSError(5, "made by the test", f"{BUCKET}/file"), status, is_away=is_away)

    try:
        repeat(BUCKET, request)
    except TransientError:
        return made, False
    return made, True


def test_an_answer_that_was_spoilt_is_asked_for_a_few_times(caplog):
    assert repeat_failing(ATTEMPTS - 1) == (ATTEMPTS, True)
    assert repeat_failing(10**6) == (ATTEMPTS, False)
    assert not caplog.messages


def test_a_busy_store_is_waited_for_and_a_silent_one_only_if_it_ever_spoke(caplog):
    assert repeat_failing(ATTEMPTS, is_away=True) == (ATTEMPTS, False)
    assert not caplog.messages
    assert repeat_failing(9, "503 Slow Down", is_away=True) == (10, True)
    assert_names(caplog.messages[0], f"503 Slow Down 1 s {BUCKET}/file")
    caplog.clear()
    assert repeat_failing(9, is_away=True) == (10, True)
    assert_names(caplog.messages[0], f"waiting {BUCKET}/file")
    made, succeeded = repeat_failing(10**6, "503 Slow Down", is_away=True)
    assert not succeeded
    assert made > ATTEMPTS
