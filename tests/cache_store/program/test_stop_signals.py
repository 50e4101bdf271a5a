"""Which signals are one request to stop, and which one a second; this process sends them to itself."""

import os
import signal

import pytest

from cache_store.program.run_program import run_program
from cache_store.program.stop_signals import FORWARDED_S, stop_on_signals, unwound_by_sigterm


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_sigterm_forwarded_on_top_is_the_same_request(first):
    stops = []
    with unwound_by_sigterm(), stop_on_signals(lambda: stops.append(first)):
        send(first, signal.SIGTERM, signal.SIGTERM)
    assert stops == [first]


@pytest.mark.parametrize(("second", "after_s"), [(signal.SIGINT, 0.0), (signal.SIGTERM, FORWARDED_S + 1)])
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_another_ctrl_c_or_a_later_sigterm_stops_at_once(first, second, after_s):
    stops, times = [], iter([0.0, after_s])
    with (
        pytest.raises(KeyboardInterrupt),
        unwound_by_sigterm(),
        stop_on_signals(lambda: stops.append(first), clock=lambda: next(times)),
    ):
        send(first, second)
    assert stops == [first]


def test_a_forwarded_sigterm_does_not_interrupt_the_way_out(capsys):
    done = []

    def run(argv):
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGTERM)
            done.append("cleared up")

    assert run_program("program", run, []) == 3
    assert done == ["cleared up"]
    assert capsys.readouterr().err.startswith("program: stopped: ")
