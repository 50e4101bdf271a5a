"""How often progress is written, by a clock that the test turns."""

import io
import sys

import pytest

from cache_store.program.progress_bar import progress_bar

SECONDS = 600


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [1_000_000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def run(clock: list[float]) -> None:
    """A step a second."""
    with progress_bar(total=SECONDS, desc="work") as bar:
        for _ in range(SECONDS):
            clock[0] += 1
            bar.update()


def test_a_log_gets_a_line_every_half_minute(monkeypatch, clock):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    run(clock)
    assert SECONDS / 30 <= log.getvalue().count("\r") <= SECONDS / 30 + 3
    assert "100%" in log.getvalue()


def test_a_terminal_gets_every_step(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run(clock)
    assert terminal.getvalue().count("\r") >= SECONDS
