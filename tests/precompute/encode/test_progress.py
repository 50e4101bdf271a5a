"""What a build writes of its progress where its output is a file, by a clock that the test turns."""

import io
import sys
from contextlib import closing

from precompute.encode.pipeline import Progress
from precompute.encode.progress import BuildProgress


def test_a_build_of_ten_minutes_leaves_twenty_lines_in_a_log(monkeypatch):
    log, now = io.StringIO(), [1_000_000.0]
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with closing(BuildProgress(6_000, [], max_reject_fraction=1.0)) as progress:
        for _ in range(6_000):
            now[0] += 0.1
            progress(Progress(samples=1, elapsed_s=0.1))
    assert 20 <= log.getvalue().count("\r") <= 23
    assert "6000/6000" in log.getvalue()
