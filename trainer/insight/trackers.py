"""Trackers that get a run's figures besides its own log: TensorBoard's event files, Weights & Biases.

TensorBoard's own writer is not used: its thread reports a full disk with a traceback. wandb, which is optional, is
imported when the config names it.
"""

import importlib
import os
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.messages import printable
from cache_store.storage.local import write_file
from cache_store.storage.publish import make_folder, name_in_errors
from trainer.config import TrainConfig
from trainer.run.observers import Caption, caption_text, preview_png

PROJECT = "encode-once"
"""Project name in W&B, unless WANDB_PROJECT names another."""

TEXT_PLUGIN = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))

FILE_VERSION = "brain.Event:2"


class EventFile:
    """A new event file in `folder`; it replaces earlier files' values of `purge_step` and later steps."""

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
            values.append(Summary.Value(tag=tag, metadata=TEXT_PLUGIN, tensor=text))
            if (preview := preview_png(caption)) is not None:
                height, width, png = preview
                image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
                values.append(Summary.Value(tag=f"{tag}/preview", image=image))
        self._add(step=step, summary=Summary(value=values))

    def add_alerts(self, step: int, alerts: Sequence[str]) -> None:
        words = "\n\n".join(alerts).encode()
        text = TensorProto(dtype=DT_STRING, string_val=[words], tensor_shape=TensorShapeProto())
        self._add(step=step, summary=Summary(value=[Summary.Value(tag="alerts", metadata=TEXT_PLUGIN, tensor=text)]))

    def close(self) -> None:
        """Do nothing: the file is closed after each record."""

    def _add(self, **fields: Any) -> None:
        with name_in_errors(self.path), self.path.open("ab") as stream:
            RecordWriter(stream).write(Event(wall_time=time.time(), **fields).SerializeToString())


def caption_markdown(caption: Caption) -> str:
    """Format question, answer and reference as code blocks, so that nothing in them is read as markup."""
    reference = {} if caption.reference is None else {"reference": caption.reference}
    parts = {"prompt": caption.prompt, "answer": caption_text(caption), **reference}
    blocks = (f"{name}\n\n" + "\n".join(f"    {line}" for line in text.splitlines()) for name, text in parts.items())
    return "\n\n".join(blocks)


class Tracker(Protocol):
    """Gets a run's figures, captions and alerts as they come."""

    def add_scalars(self, step: int, values: dict[str, float]) -> None: ...

    def add_captions(self, step: int, captions: Sequence[Caption]) -> None: ...

    def add_alerts(self, step: int, alerts: Sequence[str]) -> None: ...

    def close(self) -> None: ...


def refuse_missing(config: TrainConfig) -> None:
    """Raise ConfigError, before the run begins, if wandb is asked for and not installed."""
    if "wandb" in config.run.trackers:
        try:
            importlib.import_module("wandb")
        except ModuleNotFoundError:
            raise ConfigError("run.report_to: wandb is not installed; run `pip install wandb`") from None


def open_trackers(config: TrainConfig, completed_steps: int) -> list[Tracker]:
    return [TRACKERS[name](config, completed_steps) for name in config.run.trackers]


class WandbRun:
    """A W&B run, continued when ours resumes; repeated steps are logged again.

    Values are plotted over our own step: W&B's only grows, so it would refuse the validation that a stopped run owes.
    """

    def __init__(self, config: TrainConfig, completed_steps: int) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        folder = config.run.folder
        try:
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=folder.resolve().name,
                id=own_id(folder),
                resume="allow",
                dir=str(folder),
                config=asdict(config),
                settings=self._wandb.Settings(console="off", silent=True),
            )
        except self._wandb.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise EncodeOnceError(
                f"run.report_to: wandb: {reason}; without a network or an account, set WANDB_MODE=offline"
            ) from None
        self._run.define_metric("*", step_metric="step")
        synced = f"offline; to upload it: wandb sync {shlex.quote(str(Path(self._run.dir).parent))}"
        print(f"wandb: {synced if self._run.offline else self._run.url}", flush=True)

    def add_scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def add_captions(self, step: int, captions: Sequence[Caption]) -> None:
        previews = [
            self._wandb.Image(each.preview, caption=f"{each.id}: {caption_text(each)}")
            for each in captions
            if each.preview is not None
        ]
        logged = {"step": step, "captions": self._wandb.Table(**table_of(captions))}
        self._run.log(logged | ({"previews": previews} if previews else {}))

    def add_alerts(self, step: int, alerts: Sequence[str]) -> None:
        for alert in alerts:
            self._run.alert(title="encode-once", text=f"step {step:,}: {alert}")

    def close(self) -> None:
        self._run.finish()


def table_of(captions: Sequence[Caption]) -> dict[str, list[Any]]:
    """Return captions as columns and rows, the form of W&B's tables."""
    return {
        "columns": ["row", "id", "prompt", "answer", "reference"],
        "data": [[each.row, each.id, each.prompt, caption_text(each), each.reference] for each in captions],
    }


def own_id(folder: Path) -> str:
    """Return the run's id in W&B, drawn once and kept in the run's folder."""
    file = folder / "wandb" / "id"
    if not file.is_file():
        make_folder(file.parent)
        write_file(file, secrets.token_hex(4).encode())
    return file.read_text()


def open_event_file(config: TrainConfig, completed_steps: int) -> EventFile:
    return EventFile(config.run.folder / "tensorboard", purge_step=completed_steps + 1)


TRACKERS: dict[str, Callable[[TrainConfig, int], Tracker]] = {
    "tensorboard": open_event_file,
    "wandb": WandbRun,
}
