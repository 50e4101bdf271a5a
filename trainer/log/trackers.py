"""Where a run's figures go as they come, besides its own log: TensorBoard's event files, or Weights & Biases.

A library that is an extra is imported where the config names it.
"""

import importlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.storage.files import make_folder
from cache_store.storage.local import write_file
from trainer.config import TrainConfig
from trainer.log.captions import Caption
from trainer.log.event_file import EventFile

PROJECT = "encode-once"
"""Of runs in W&B, where WANDB_PROJECT names no other."""

EXTRAS = ("wandb",)
"""Trackers whose library is an extra of the same name."""


class Tracker(Protocol):
    def add_scalars(self, step: int, values: dict[str, float]) -> None: ...

    def add_captions(self, step: int, captions: Sequence[Caption]) -> None: ...

    def close(self) -> None: ...


def refuse_missing(config: TrainConfig) -> None:
    """Raise ConfigError, before the run begins, for a tracker that is not installed."""
    for name in set(config.run.trackers) & set(EXTRAS):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            raise ConfigError(
                f"run.report_to: {name} is not installed; run `pip install '.[{name}]'` in a clone of encode-once"
            ) from None


def open_trackers(config: TrainConfig, completed_steps: int) -> list[Tracker]:
    return [TRACKERS[name](config, completed_steps) for name in config.run.trackers]


class WandbRun:
    """A run of W&B, gone on with when ours resumes; steps that are then done again are logged again.

    Figures stand over our own steps: W&B's would refuse the validation that a stopped run owes its last step.
    """

    def __init__(self, config: TrainConfig, completed_steps: int) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        folder = config.run.folder
        id_file = folder / "wandb" / "id"
        if not id_file.is_file():
            make_folder(id_file.parent)
            write_file(id_file, secrets.token_hex(4).encode())
        try:
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=folder.resolve().name,
                id=id_file.read_text(),
                resume="allow",
                dir=str(folder),
                config=asdict(config),
                settings=self._wandb.Settings(console="off", silent=True),
            )
        except self._wandb.Error as error:
            said = " ".join(str(error).split()).rstrip(".")
            raise EncodeOnceError(
                f"run.report_to: wandb: {said}; without a network or an account, set WANDB_MODE=offline"
            ) from None
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            print(f"wandb: {self._run.url}", flush=True)

    def add_scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def add_captions(self, step: int, captions: Sequence[Caption]) -> None:
        columns = ["row", "id", "prompt", "answer", "reference"]
        rows = [[each.row, each.id, each.prompt, each.shown_text, each.reference] for each in captions]
        previews = [
            self._wandb.Image(each.preview, caption=f"{each.id}: {each.shown_text}")
            for each in captions
            if each.preview is not None
        ]
        logged = {"step": step, "captions": self._wandb.Table(columns=columns, data=rows)}
        self._run.log(logged | ({"previews": previews} if previews else {}))

    def close(self) -> None:
        self._run.finish()


def open_event_file(config: TrainConfig, completed_steps: int) -> EventFile:
    return EventFile(config.run.folder / "tensorboard", purge_step=completed_steps + 1)


TRACKERS: dict[str, Callable[[TrainConfig, int], Tracker]] = {"tensorboard": open_event_file, "wandb": WandbRun}
