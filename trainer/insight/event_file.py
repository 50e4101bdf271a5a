"""TensorBoard's event file, written line by line.

TensorBoard's own writer uses a thread, which reports a full disk by a traceback.
"""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from cache_store.refusal import printable
from cache_store.storage.files import make_folder, naming
from trainer.insight.captions import caption_text, preview_png
from trainer.run.observers import Caption

TEXT = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))

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

    def add_captions(self, step: int, captions: Sequence[Caption]) -> None:
        """Add each caption as text beside its reference, and its latent's preview as an image."""
        values = []
        for caption in captions:
            tag, words = f"captions/{printable(caption.id)}", caption_markdown(caption).encode()
            text = TensorProto(dtype=DT_STRING, string_val=[words], tensor_shape=TensorShapeProto())
            values.append(Summary.Value(tag=tag, metadata=TEXT, tensor=text))
            if (preview := preview_png(caption)) is not None:
                height, width, png = preview
                image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
                values.append(Summary.Value(tag=f"{tag}/preview", image=image))
        self._add(step=step, summary=Summary(value=values))

    def add_alerts(self, step: int, alerts: Sequence[str]) -> None:
        words = "\n\n".join(alerts).encode()
        text = TensorProto(dtype=DT_STRING, string_val=[words], tensor_shape=TensorShapeProto())
        self._add(step=step, summary=Summary(value=[Summary.Value(tag="alerts", metadata=TEXT, tensor=text)]))

    def close(self) -> None:
        """Nothing is left to write."""

    def _add(self, **fields: Any) -> None:
        with naming(self.path), self.path.open("ab") as stream:
            RecordWriter(stream).write(Event(wall_time=time.time(), **fields).SerializeToString())


def caption_markdown(caption: Caption) -> str:
    """Set question, answer and reference as blocks of code, so that nothing in them is markup."""
    reference = {} if caption.reference is None else {"reference": caption.reference}
    parts = {"prompt": caption.prompt, "answer": caption_text(caption), **reference}
    blocks = (f"{name}\n\n" + "\n".join(f"    {line}" for line in text.splitlines()) for name, text in parts.items())
    return "\n\n".join(blocks)
