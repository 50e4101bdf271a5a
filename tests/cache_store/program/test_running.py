"""Full disks, closed outputs, progress and stop signals, in all programs."""

import os
import signal
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest

from cache_store.errors import CacheError
from cache_store.program.gpu_use import GpuMeter
from cache_store.program.running import FORWARDED_S, run_program
from tests.cache_store.conftest import samples_of
from tests.make_cache import make_cache
from tests.named import assert_names
from tests.nvml import stand_in


@pytest.fixture
def cache(tmp_path) -> Path:
    return make_cache(tmp_path / "cache", samples_of((4, 3, 2)))


def test_a_closed_standard_error_takes_nothing_but_messages(cache):
    """Some crons close it; messages of libraries must not end up in another file that gets its number."""
    for place, code in ((cache, 0), (cache / "none", 2)):
        line = [sys.executable, "-m", "cache_store", "verify", str(place)]
        done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *line], capture_output=True, timeout=120)
        assert (done.returncode, done.stderr, bool(done.stdout)) == (code, b"", not code)
    code = "import sys, os; from cache_store.program.running import run_program as r;"
    code += "sys.exit(r('p', lambda words: print(os.readlink('/proc/self/fd/2')) or 0, []))"
    line = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.check_output(line, timeout=120) == b"/dev/null\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_takes_no_more_is_named(cache, unbuffered):
    info, environment = [sys.executable, "-m", "cache_store", "info", str(cache)], {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(info, stdout=full, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert_names(done.stderr, "standard output")


SIGNALLED_TWICE = """
import os, sys
from signal import SIGINT, SIGTERM
from cache_store.program import running
def run(words):
    with running.stop_on_signals(unwinds={unwinds}) as stop:
        try:
            os.kill(os.getpid(), {first})
        finally:
            assert stop.is_set()
            running.FORWARDED_S = {forwarded_s}
            os.kill(os.getpid(), {second})
    return 0
sys.exit(running.run_program("program", run, []))
"""


@pytest.mark.parametrize(("first", "unwinds"), [("SIGINT", False), ("SIGTERM", True)])
@pytest.mark.parametrize(
    ("second", "forwarded_s", "ended_by"),
    [("SIGINT", FORWARDED_S, signal.SIGINT), ("SIGTERM", -1.0, signal.SIGTERM), ("SIGTERM", FORWARDED_S, None)],
)
def test_another_ctrl_c_or_a_later_sigterm_kills(unwinds, first, second, forwarded_s, ended_by):
    """A forwarded SIGTERM counts as the same request. Work that looks at the event may end well after it."""
    code = SIGNALLED_TWICE.format(unwinds=unwinds, first=first, second=second, forwarded_s=forwarded_s)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == (-ended_by if ended_by else 3 if unwinds else 0)
    assert "Traceback" not in done.stderr


def call_a_stop_an_error() -> int:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        raise CacheError("the weights cannot be read") from None
    return 0


def swallow_a_stop() -> int:
    with suppress(BaseException):
        os.kill(os.getpid(), signal.SIGINT)
    return 0


@pytest.mark.parametrize("work", [call_a_stop_an_error, swallow_a_stop])
def test_a_stop_that_does_not_arrive_is_a_stop(work, capsys):
    """A library turns it into its own error or swallows it."""
    assert run_program("program", lambda argv: work(), []) == 3
    assert capsys.readouterr().err.splitlines()[-1].startswith("program: stopped: ")


STOPPED_IN_AN_IMPORT = """
import os, signal, sys
from importlib.machinery import PathFinder
class Stopping(PathFinder):
    def find_spec(name, *_):
        return os.kill(os.getpid(), signal.SIGINT) if name == "{imported}" else None
sys.meta_path.insert(0, Stopping)
from {module}.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("module", "imported", "exit_code", "lines"),
    [("precompute", "numpy", 3, 1), ("trainer", "cache_store.program.running", -signal.SIGINT, 0)],
)
def test_ctrl_c_while_a_program_is_imported_is_at_most_one_line(module, imported, exit_code, lines):
    command = [sys.executable, "-c", STOPPED_IN_AN_IMPORT.format(module=module, imported=imported)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n"), done.stderr.count(": stopped: ")) == (exit_code, lines, lines)


@pytest.mark.parametrize("uuid", [None, "another", "part", "one"])
def test_without_a_figure_or_the_package_nothing_is_read(monkeypatch, uuid):
    nvml = stand_in(monkeypatch)
    if uuid == "one":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    with closing(GpuMeter(uuid)) as meter:
        assert meter.take() == []
    assert nvml.reads == 0
