"""Run programs in processes of their own, at the same time or killed at a step of writing."""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from cache_store.program.running import SignalState, end_process
from cache_store.storage.store import STORES
from tests.command_runs import PROGRAMS
from tests.faulty_store import DeadlyStore
from tests.forked import Forked

PATIENCE_S = 300
Prepare = Callable[[], None] | None


class Program:
    """A running command line; its output and scratch files are in `folder`."""

    def __init__(self, line: Sequence[str], folder: Path, prepare: Prepare = None) -> None:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as stream:
            self.said = Path(stream.name)
        self.process = Forked(target=run, args=([*line], self.said, prepare), daemon=True)
        self.process.start()

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> tuple[int | None, str]:
        """Return exit code and output; a process that hangs is killed."""
        self.process.join(PATIENCE_S)
        self.process.kill()
        self.process.join()
        return self.process.exitcode, self.said.read_text()


def run(line: Sequence[str], said: Path, prepare: Prepare) -> None:
    tempfile.tempdir = str(said.parent)
    if prepare is not None:
        prepare()
    with said.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    program, *arguments = line
    exit_code = PROGRAMS[program](arguments)
    if SignalState.first_s is not None:
        end_process(exit_code)  # as a program does that a signal stops
    sys.exit(exit_code)


def die_at(sync: int) -> None:
    """Kill this process at that sync, from 1, of a cache at `deadly://PATH`."""
    syncs = count(1)
    STORES["deadly"] = lambda path: DeadlyStore(Path(path), sync, syncs)
