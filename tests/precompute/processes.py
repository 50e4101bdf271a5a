"""Builds in processes of their own, to be killed, stopped and watched."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.precompute.conftest import write_config


def start_building(
    folder: Path, values: dict[str, Any], wrapper: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], list[str]]:
    """A build in its own process and session, with its first shard committed; also its arguments.

    `wrapper` is a command that runs it.
    """
    arguments = ["build", "--config", str(write_config(folder / "b.yaml", values))]
    process = start([*wrapper, sys.executable, "-m", "precompute", *arguments])
    wait_for(lambda: list((folder / "cache").glob("commits/*.json")))
    return process, arguments


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """In a session of its own; the session's number is the process's."""
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def workers_of(session: int) -> list[int]:
    """Worker processes of a session, from the moment that they exist."""
    return sorted(pid for pid in session_members(session) if "--multiprocessing-fork" in command_line(pid))


def wait_for(condition: Callable[[], object], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)


def session_members(session: int) -> list[int]:
    """Processes of a session, from /proc: the sixth field of `stat` is the session id."""
    members = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(status.parent.name))
    return members


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return ""
