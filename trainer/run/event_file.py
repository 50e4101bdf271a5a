"""TensorBoard's event file, written line by line.

TensorBoard's own writer uses a thread, which reports a full disk by a traceback.
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from cache_store.storage.files import make_folder, naming

FILE_VERSION = "brain.Event:2"


class EventFile:
    """A new event file in `folder`; it replaces what earlier files there hold of `purge_step` and later."""

    def __init__(self, folder: Path, purge_step: int) -> None:
        make_folder(folder)
        now = time.time_ns()
        # TensorBoard reads files in the order of their names, which begin with the time in seconds.
        place = f"{now // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{now % 10**9:09d}"
        self.path = folder / f"events.out.tfevents.{place}"
        self._add(file_version=FILE_VERSION)
        self._add(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def add_scalars(self, step: int, values: dict[str, float]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=Summary(value=scalars))

    def _add(self, **fields: Any) -> None:
        with naming(self.path), self.path.open("ab") as stream:
            RecordWriter(stream).write(Event(wall_time=time.time(), **fields).SerializeToString())
