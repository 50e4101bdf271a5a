"""Trackers that get a run's figures, captions and alerts besides its own log: TensorBoard, Weights & Biases.

W&B reads TensorBoard's event files, so they are written for it too. wandb is optional, and imported when it is named.
"""

import importlib
import os
import secrets
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.messages import printable
from cache_store.storage.local import write_file
from cache_store.storage.publish import make_folder, name_in_errors
from trainer.config import TrainConfig
from trainer.run.figures import Caption, Metrics

PROJECT = "encode-once"
"""Project name in W&B, unless WANDB_PROJECT names another."""

PREVIEW_SIDE = 224
"""Least pixels of a preview's longest side: TensorBoard does not enlarge small pictures."""

WRITER_S = 1.0
"""Longest wait for a writer's thread that has failed."""

Track = Callable[[int, Metrics, Sequence[Caption], Sequence[str]], None]


def refuse_missing(config: TrainConfig) -> None:
    """Raise ConfigError, before the run begins, if wandb is asked for and not installed."""
    if "wandb" in config.run.trackers:
        try:
            importlib.import_module("wandb")
        except ModuleNotFoundError:
            raise ConfigError("run.report_to: wandb is not installed; run `pip install wandb`") from None


@contextmanager
def open_trackers(config: TrainConfig, completed_steps: int) -> Iterator[Track]:
    """Open the trackers of run.report_to; repeated steps replace those of TensorBoard's earlier files."""
    if not config.run.trackers:
        yield lambda *_: None
        return
    folder, wandb_run = config.run.folder / "tensorboard", None
    with ExitStack() as stack:
        if "wandb" in config.run.trackers:
            wandb_run = start_wandb(config)
            stack.callback(wandb_run.finish)
        stack.enter_context(hidden_tracebacks_of_writers())
        with name_in_errors(folder):
            writer: Any = stack.enter_context(SummaryWriter(folder, purge_step=completed_steps + 1))

        def track(step: int, metrics: Metrics, captions: Sequence[Caption], alerts: Sequence[str]) -> None:
            scalars = [Summary.Value(tag=name, simple_value=each) for name, each in metrics.items() if name != "step"]
            with name_in_errors(folder):
                writer.file_writer.add_summary(Summary(value=scalars), step)  # one event; add_scalar makes one of each
                for caption in captions:
                    add_caption(writer, step, caption)
                if alerts:
                    writer.add_text("alerts", "\n\n".join(alerts), step)
                writer.flush()
            if wandb_run is not None:
                tell_wandb(wandb_run, step, captions, alerts)

        yield track


def add_caption(writer: Any, step: int, caption: Caption) -> None:
    """Add a caption's texts, as code blocks, so that nothing in them is read as markup, and its latent's preview."""
    tag = f"captions/{printable(caption.id)}"
    blocks = [name + "\n\n    " + "\n    ".join(text.splitlines()) for name, text in caption.parts.items()]
    writer.add_text(tag, "\n\n".join(blocks), step)
    if (preview := caption.preview) is not None:
        scale = -(-PREVIEW_SIDE // max(preview.shape[:2]))
        writer.add_image(f"{tag}/preview", preview.repeat(scale, 0).repeat(scale, 1), step, dataformats="HWC")


@contextmanager
def hidden_tracebacks_of_writers() -> Iterator[None]:
    """Hide what SummaryWriter's thread prints if a disk is full; flush raises the same error in this thread."""
    shown = threading.excepthook

    def is_writer(thread: object) -> bool:
        return type(thread).__module__.startswith("tensorboard.")

    def show(failed: Any) -> None:
        if not (is_writer(failed.thread) and isinstance(failed.exc_value, OSError)):
            shown(failed)

    threading.excepthook = show
    try:
        yield
    finally:
        for thread in filter(is_writer, threading.enumerate()):
            thread.join(WRITER_S)
        threading.excepthook = shown


def start_wandb(config: TrainConfig) -> Any:
    """Start a W&B run, continued when ours resumes; repeated steps are logged again."""
    wandb: Any = importlib.import_module("wandb")
    folder = config.run.folder
    id_file = folder / "wandb" / "id"
    if not id_file.is_file():
        make_folder(id_file.parent)
        write_file(id_file, secrets.token_hex(4).encode())
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.resolve().name,
            id=id_file.read_text(),
            resume="allow",
            dir=str(folder),
            config=asdict(config),
            sync_tensorboard=True,
            settings=wandb.Settings(console="off", silent=True),
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise EncodeOnceError(
            f"run.report_to: wandb: {reason}; without a network or an account, set WANDB_MODE=offline"
        ) from None
    synced = f"offline; to upload it: wandb sync {shlex.quote(str(Path(run.dir).parent))}"
    print(f"wandb: {synced if run.offline else run.url}", flush=True)
    return run


def tell_wandb(run: Any, step: int, captions: Sequence[Caption], alerts: Sequence[str]) -> None:
    """Send W&B the words of captions, which it does not read from event files, as a table; and alerts."""
    if captions:
        rows = [{"row": each.row, "id": each.id, **each.parts} for each in captions]
        columns = ["row", "id", "prompt", "answer", "reference"]
        table = importlib.import_module("wandb").Table(columns, [[row.get(name) for name in columns] for row in rows])
        run.log({"captions": table, "global_step": step})
    for alert in alerts:
        run.alert(title="encode-once", text=f"step {step:,}: {alert}")
