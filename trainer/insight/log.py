"""What a run says: where it runs and what it trains, then one line a step, on the terminal, as JSON, and in trackers.

Trackers are TensorBoard and Weights & Biases. W&B reads TensorBoard's event files, so these are written for it too.
wandb is optional, and imported when it is named.
"""

import importlib
import json
import math
import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.log import utc_time
from cache_store.messages import printable
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.local import write_file
from cache_store.storage.publish import make_folder, name_in_errors
from trainer.config import TrainConfig
from trainer.model.kernels import MATH, attention_kernels
from trainer.model.model_config import PRETRAINED
from trainer.model.projector_file import library_versions
from trainer.run.figures import Answered, Metrics, Validation
from trainer.run.folder import ALERTS, CAPTIONS, METRICS_FILE, NONFINITE, TIME, as_step
from trainer.run.memory import device_name, memory_bytes
from trainer.run.session import Session

PROJECT = "encode-once"
"""Project name in W&B, unless WANDB_PROJECT names another."""

PREVIEW_SIDE = 224
"""Least pixels of a preview's longest side: TensorBoard does not enlarge small pictures."""

LogStep = Callable[[int, Metrics, Validation, Sequence[str]], None]
"""Logs a step: its number, its figures, its validation, the problems that began at it."""


def announce(session: Session) -> None:
    """Print hardware, versions, attention and trained parameters, and warn of what rarely works."""
    run, world, projectors = session.config.run, session.world, session.projectors
    language = session.projector_config.language_model.name
    for tower in session.projector_config.towers:
        if tower.projector == PRETRAINED and tower.encoder_model != language:
            world.warn(
                f"model.towers.{tower.name}: the projector of {language} reads hidden states of its own vision tower "
                f"only, but the cache was made by {tower.encoder_model or 'an unknown model'}; check that the two "
                "towers have equal weights: from another tower's states the projector makes noise"
            )
    if not world.is_main and not session.in_step:
        return
    longest = int(session.text.lengths(session.split.train).max())
    tokens, text = projectors.num_tokens + longest, torch.empty(1, longest, device=world.device)
    kernels = attention_kernels(session.language, tokens, session.model.blocks(text))
    shown = ", ".join(f"{kind}: {kernel}" for kind, kernel in kernels.items()) or "not known"
    trained = {
        f"{module}.{name}": each
        for module, part in session.model.trained_modules()
        for name, each in part.named_parameters()
        if each.requires_grad
    }
    shapes = ", ".join(f"{name} {'x'.join(map(str, each.shape))}" for name, each in trained.items())
    memory = f"{memory_bytes(world.device) / 2**30:,.0f} GiB"
    world.say(
        f"device     {world.size} x {device_name(world.device)}, {memory}; {run.precision}\n"
        f"versions   {', '.join(' '.join(each) for each in library_versions().items())}\n"
        f"attention  {session.language.config._attn_implementation}; {shown}; at {tokens:,} tokens\n"
        f"learns     {sum(each.numel() for each in trained.values()):,} parameters: {shapes}"
    )
    if math_layers := [kind for kind, kernel in kernels.items() if kernel == MATH]:
        world.warn(f"{' and '.join(math_layers)}: torch's math kernel holds all attention weights in memory")


@contextmanager
def open_log(config: TrainConfig, completed: int, total: int) -> Iterator[LogStep]:
    """Continue a run's log after `completed` of `total` steps.

    A step without figures has its line already: a run stopped before the step's validation, which is added to the line.
    """
    folder = config.run.folder
    drop_later_steps(folder / METRICS_FILE, completed)
    bar = ProgressBar("train", total, "step", done=completed, delay_s=0.0)
    with bar, open_trackers(config, completed) as track:

        def log_step(step: int, metrics: Metrics, validation: Validation, alerts: Sequence[str]) -> None:
            if metrics:
                append_step(folder, metrics | validation.metrics, validation.captions, alerts)
                bar.reach(step, f"loss {metrics['loss']:.3f}, {metrics['samples_per_s']:.1f} samples/s")
            else:
                amend_last_step(folder, validation.metrics, validation.captions)
            track(step, metrics, validation, alerts)
            lines = [f"step {step:,}: {alert}" for alert in alerts] + [validation.summary] * bool(validation.summary)
            for each in validation.captions:
                lines += each.lines(("answer", "reference"))
            if lines:
                bar.write("\n".join(lines))

        yield log_step


def append_step(folder: Path, metrics: Metrics, captions: Sequence[Answered] = (), alerts: Sequence[str] = ()) -> None:
    path, noted = folder / METRICS_FILE, {ALERTS: [*alerts]} if alerts else {}
    with name_in_errors(path), path.open("a", encoding="utf-8") as stream:
        stream.write(as_json({**metrics, TIME: utc_time(), **noted}, captions) + "\n")


def amend_last_step(folder: Path, metrics: Metrics, captions: Sequence[Answered]) -> None:
    path = folder / METRICS_FILE
    *before, last = path.read_bytes().splitlines(keepends=True)
    amended = as_json(json.loads(last) | metrics, captions)
    write_file(path, b"".join([*before, amended.encode() + b"\n"]))


def as_json(record: Mapping[str, Any], captions: Sequence[Answered]) -> str:
    """Return one line of the log. JSON has no NaN: such values are null, and named under NONFINITE."""
    captioned = {CAPTIONS: [caption.record for caption in captions]} if captions else {}
    broken = {
        name: str(value) for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)
    }
    named = {**dict.fromkeys(broken), NONFINITE: broken} if broken else {}
    return json.dumps({**record, **named, **captioned}, allow_nan=False)


def drop_later_steps(path: Path, completed_steps: int) -> None:
    """Drop lines of steps after the checkpoint, which run again, and lines cut short by a kill or a full disk."""
    if not path.exists():
        return
    lines = [(line, as_step(line)) for line in path.read_bytes().split(b"\n")]
    kept = [line for line, record in lines if record is not None and record["step"] <= completed_steps]
    write_file(path, b"".join(line + b"\n" for line in kept))


def refuse_missing(config: TrainConfig) -> None:
    if "wandb" in config.run.report_to:
        try:
            importlib.import_module("wandb")
        except ModuleNotFoundError:
            raise ConfigError("run.report_to: wandb is not installed; run `pip install wandb`") from None


@contextmanager
def open_trackers(config: TrainConfig, completed_steps: int) -> Iterator[LogStep]:
    """Open the trackers of run.report_to; repeated steps replace those of TensorBoard's earlier files."""
    if not config.run.report_to:
        yield lambda *_: None
        return
    folder, wandb_run = config.run.folder / "tensorboard", None
    with ExitStack() as stack:
        if "wandb" in config.run.report_to:
            wandb_run = start_wandb(config)
            stack.callback(wandb_run.finish)
        with name_in_errors(folder):
            writer: Any = stack.enter_context(SummaryWriter(folder, purge_step=completed_steps + 1))

        def track(step: int, metrics: Metrics, validation: Validation, alerts: Sequence[str]) -> None:
            figures = {name: each for name, each in (metrics | validation.metrics).items() if name != "step"}
            scalars = [Summary.Value(tag=name, simple_value=each) for name, each in figures.items()]
            with name_in_errors(folder):
                writer.file_writer.add_summary(Summary(value=scalars), step)  # add_scalar would write one event each
                for caption in validation.captions:
                    add_caption(writer, step, caption)
                if alerts:
                    writer.add_text("alerts", "\n\n".join(alerts), step)
                writer.flush()
            if wandb_run is not None:
                tell_wandb(wandb_run, step, validation.captions, alerts)

        yield track


def add_caption(writer: Any, step: int, caption: Answered) -> None:
    """Add a caption's texts and its latent's preview; the texts are code blocks, so that no markup in them is read."""
    tag = f"captions/{printable(caption.subject.image['id'])}"
    blocks = [name + "\n\n    " + "\n    ".join(text.splitlines()) for name, text in caption.parts.items()]
    writer.add_text(tag, "\n\n".join(blocks), step)
    if (preview := caption.preview) is not None:
        scale = -(-PREVIEW_SIDE // max(preview.shape[:2]))
        writer.add_image(f"{tag}/preview", preview.repeat(scale, 0).repeat(scale, 1), step, dataformats="HWC")


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


def tell_wandb(run: Any, step: int, captions: Sequence[Answered], alerts: Sequence[str]) -> None:
    if captions:
        rows = [{**each.subject.image, **each.parts} for each in captions]
        columns = ["row", "id", "prompt", "answer", "reference"]
        table = importlib.import_module("wandb").Table(columns, [[row.get(name) for name in columns] for row in rows])
        run.log({"captions": table, "global_step": step})
    for alert in alerts:
        run.alert(title="encode-once", text=f"step {step:,}: {alert}")
