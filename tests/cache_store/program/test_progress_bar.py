"""How often progress is written, by a clock that the test turns."""

import io
import sys

import pytest

from cache_store.program.progress_bar import progress_bar


@pytest.mark.parametrize(("is_terminal", "lines"), [(False, range(20, 24)), (True, range(600, 1_200))])
def test_a_terminal_gets_every_step_and_a_log_two_a_minute(monkeypatch, is_terminal, lines):
    now, stream = [1_000_000.0], io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar(total=600, desc="work") as bar:
        for _ in range(600):
            now[0] += 1
            bar.update()
    assert stream.getvalue().count("\r") in lines
    assert "100%" in stream.getvalue()
