"""Builds in processes of their own, to be stopped and killed."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

Build = subprocess.Popen[str]


def start_build(config: Path) -> Build:
    """Start a build in a new session, whose number is the process's."""
    command = [sys.executable, "-m", "precompute", "build", "--config", str(config)]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(condition: Callable[[], object], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def processes_of(session: int) -> dict[int, str]:
    """Return the command line of each living process of a session."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _parent, _group, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            command_line = (folder / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if int(its_session) == session and state != "Z":
            found[int(folder.name)] = command_line
    return found
