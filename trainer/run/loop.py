"""The training loop: global batches in, a projector out; it stops after any step and resumes exactly there."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch
from tqdm import tqdm

from cache_store.errors import EncodeOnceError, Interrupted
from cache_store.program.progress_bar import progress_bar
from cache_store.program.stop_signals import stop_on_signals
from cache_store.refusal import ABSENT, counted, differing
from trainer.data.batches import StepBatch
from trainer.data.prefetch import prefetched
from trainer.log.captions import Caption, Captioner
from trainer.log.metrics import Metrics, MetricsLog, read_metrics
from trainer.log.trackers import open_trackers
from trainer.model.projectors.file import CONFIG_FILE, PROJECTOR_FILE, ProjectorConfig, projector_bytes
from trainer.run.checkpoint import CheckpointFolder, CheckpointState, load_optimizer, restore_projectors
from trainer.run.folder import has_run, write_changed, write_config
from trainer.run.memory import peak_memory_bytes
from trainer.run.optim import learning_rate, make_optimizer
from trainer.run.session import Session
from trainer.run.validation import sample_names, sample_scores, shuffle_test

MUST_BE_FINITE = {"loss": "loss", "grad_norm": "gradient norm", "param_norm": "parameter norm"}
"""Figures of a step, and their names, without which a run has diverged."""


@dataclass(frozen=True)
class Validation:
    """What came of one; empty where none was due."""

    metrics: Metrics = field(default_factory=dict)
    captions: Sequence[Caption] = ()


class TrainingLoop:
    """The state of a run between two steps, and the step."""

    def __init__(
        self,
        session: Session,
        checkpoints: CheckpointFolder,
        captioner: Captioner | None = None,
        reporter: Callable[[int], None] | None = None,
    ) -> None:
        """`captioner` works on rank 0, and on all ranks there is one, or on none; `reporter` is given the run's steps.

        Rank 0 calls it after each validation and at the end, when the log and the checkpoint are on disk.
        """
        self.session, self.checkpoints, self.captioner, self.reporter = session, checkpoints, captioner, reporter
        self.config, self.world = session.config, session.world
        self.output = self.config.run.folder
        self.model = session.model
        self.parameters = [each for each in self.model.projectors.parameters() if each.requires_grad]
        self.optimizer = make_optimizer(self.model.projectors, self.config.optim)
        self.total_steps = self.config.run.total_steps(len(session.split.train), self.config.data.batch_size)
        self.started_from = session.started_from
        self.completed = 0
        """Optimizer steps done; the position is this many global batches."""
        self.stop_request = Event()
        """Set when this rank gets a signal to stop."""
        self.stopping = False
        """Whether any rank got one; equal on all ranks."""

    @property
    def position(self) -> int:
        """Samples consumed."""
        return self.completed * self.config.data.batch_size

    @property
    def projector_config(self) -> ProjectorConfig:
        """Of the projector as it is now."""
        return self.session.projector_config.trained(self.completed, self.position, self.started_from)

    @property
    def projector_bytes(self) -> bytes:
        return projector_bytes(self.model.projectors, self.projector_config)

    def resume(self, path: Path, state: CheckpointState) -> None:
        self.started_from = restore_projectors(path, self.model.projectors).training.started_from
        load_optimizer(path, self.optimizer)
        self.completed = state.step
        self.world.say(f"going on after step {state.step:,} of {self.total_steps:,}, from {path}")
        for name, before, now in differing(state.config, asdict(self.config)):
            if (before, now) != (ABSENT, "None"):  # a field that the version before had not
                self.world.say(f"  changed since then: {name}: {before} → {now}")

    def run(self) -> None:
        """Do the remaining steps, then write the projector alone, ready for use."""
        owed = self.owes_validation()
        remaining = self.completed < self.total_steps or owed
        if self.world.is_main and (remaining or not has_run(self.config.run)):
            write_config(self.config)
        if remaining:
            self.train_to_the_end(owed)
        else:
            self.world.say(f"nothing to do: step {self.completed:,} is done, and {self.total_steps:,} are asked for")
        if self.world.is_main:
            self.publish_projector()
            self.report()
        self.world.say(f"trained {counted(self.completed, 'step')}: {self.output / PROJECTOR_FILE}")

    def train_to_the_end(self, owed: bool) -> None:
        with stop_on_signals(self.stop_request.set), self.metrics_log() as log, self.progress() as bar:
            if owed:
                self.catch_up(log, bar)
            steps = range(self.completed, self.total_steps)
            with closing(prefetched(self.session.loader, steps, self.session.loader.threads)) as batches:
                for _ in steps:
                    self.one_step(batches, log, bar)

    def publish_projector(self) -> None:
        """Write the projector, unless it is there already: a run may end after its last checkpoint and before this."""
        for name, data in ((CONFIG_FILE, self.projector_config.as_json), (PROJECTOR_FILE, self.projector_bytes)):
            write_changed(self.output / name, data)

    def one_step(self, batches: Iterator[StepBatch], log: MetricsLog | None, bar: "tqdm[Any]") -> None:
        """Do a step and everything due after it, in an order in which a kill in between loses nothing."""
        began = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - began
        metrics = self.update(batch)
        elapsed = time.perf_counter() - began
        metrics["tokens"] = self.tokens_of(batch)
        metrics["samples_per_s"] = self.config.data.batch_size / elapsed
        metrics["tokens_per_s"] = metrics["tokens"] / elapsed
        metrics["data_wait_share"] = waited / elapsed
        metrics["peak_memory_bytes"] = peak_memory_bytes(self.world.device)
        self.refuse_diverged(metrics, batch, log)
        bar.set_postfix(loss=f"{metrics['loss']:.3f}", samples_s=f"{metrics['samples_per_s']:.1f}", refresh=False)
        bar.update()
        validation = self.validate(bar)
        self.stopping |= validation is None
        if log is not None:
            done = validation or Validation()
            log.write(metrics | done.metrics, done.captions)
        self.save_if_due()
        if log is not None and validation and validation.metrics and self.completed < self.total_steps:
            self.report()
        if validation is None or (self.stopping and self.completed < self.total_steps):
            raise self.interrupted()

    def tokens_of(self, batch: StepBatch) -> int:
        """Count what the language model reads of a global batch: each tower's tokens and the text, without padding."""
        return len(batch.numbers) * self.model.projectors.num_tokens + batch.text_tokens

    def interrupted(self) -> Interrupted:
        return Interrupted(f"after step {self.completed:,} of {self.total_steps:,}; run the same command to go on")

    def owes_validation(self) -> bool:
        """Tell whether the run was stopped before the validation that its last step was due; rank 0's log tells."""
        owed = 0.0
        if self.world.is_main and self.validation_due:
            metrics = read_metrics(self.output, self.completed)
            owed = float(bool(metrics) and "val_loss" not in metrics)
        return bool(self.world.sum(torch.tensor(owed, device=self.world.device)))

    def catch_up(self, log: MetricsLog | None, bar: "tqdm[Any]") -> None:
        """Do the validation that is still due, and add it to the log line of its step."""
        validation = self.validate(bar)
        if validation is None:
            raise self.interrupted()
        if log is not None:
            log.amend({"step": self.completed, **validation.metrics}, validation.captions)
            self.report()

    def update(self, batch: StepBatch) -> Metrics:
        """Do one optimizer step; where the loss or its gradient is not finite, the projector stays as it is."""
        loss, grad_norm = self.compute_gradients(batch)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return {"step": self.completed + 1, "loss": loss, "grad_norm": grad_norm, **self.progress_made()}
        lr = learning_rate(self.config.optim, self.completed, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.completed += 1
        param_norm = torch.nn.utils.get_total_norm([parameter.detach() for parameter in self.parameters]).item()
        return {
            "step": self.completed, "loss": loss, "grad_norm": grad_norm, "param_norm": param_norm, "lr": lr,
            **self.progress_made(),
        }  # fmt: skip

    def progress_made(self) -> Metrics:
        return {"epoch": self.position / len(self.session.split.train), "position": self.position}

    def compute_gradients(self, batch: StepBatch) -> tuple[float, float]:
        """Compute and clip the global batch's gradients; return its loss per label token and their norm before.

        Both are the same whatever share each rank has. Here ranks also learn whether one of them was asked to stop.
        """
        loss = torch.zeros((), device=self.world.device)
        for micro_batch in batch.micro_batches:
            part = self.model(micro_batch.to(self.world.device)).sum() / batch.label_tokens
            part.backward()
            loss += part.detach()
        stop_flag = torch.tensor(float(self.stop_request.is_set()), device=self.world.device)
        sums = self.world.sum_gradients(self.parameters, torch.stack([loss, stop_flag]))
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optim.max_grad_norm or math.inf)
        total_loss, stops = sums.tolist()
        self.stopping = stops > 0
        return total_loss, norm.item()

    def refuse_diverged(self, metrics: Metrics, batch: StepBatch, log: MetricsLog | None) -> None:
        """Log a step whose figures are not finite, and raise EncodeOnceError: nothing of it is saved."""
        found = {name: metrics[key] for key, name in MUST_BE_FINITE.items() if key in metrics}
        if all(map(math.isfinite, found.values())):
            return
        if log is not None:
            log.write(metrics)
            self.report()
        saved = max(self.checkpoints.steps(), default=0)
        again = f"; it goes on from step {saved}: if it diverges there again, delete that checkpoint" if saved else ""
        raise EncodeOnceError(
            f"step {metrics['step']} diverged: {', '.join(f'{name} {value:g}' for name, value in found.items())}; "
            f"try a lower optim.lr{again}\n"
            f"  samples  {sample_names(self.session, batch.numbers)}"
        )

    @property
    def validation_due(self) -> bool:
        last, regular = self.completed == self.total_steps, self.completed % self.config.run.eval_every == 0
        return self.completed > 0 and (last or regular) and len(self.session.split.validation) > 0

    def validate(self, bar: "tqdm[Any]") -> Validation | None:
        """Validate and caption if it is due; None where a rank was stopped."""
        if not self.validation_due:
            return Validation()
        if self.stopping:
            return None
        metrics = self.measure(bar)
        captions = None if metrics is None else self.caption()
        if metrics is None or captions is None:
            return None
        if captions:
            bar.write("\n".join(line for caption in captions for line in caption.lines()))
        return Validation(metrics, captions)

    def measure(self, bar: "tqdm[Any]") -> Metrics | None:
        """Measure loss and accuracy, with shuffled latents too where two samples are held out; None where stopped."""
        if len(numbers := self.session.split.validation) < 2:
            own = sample_scores(self.session, numbers, self.stop_request.is_set)
            return None if own is None else {"val_loss": own.mean_loss, "val_accuracy": own.accuracy}
        result = shuffle_test(self.session, self.stop_request.is_set)
        if result is None:
            return None
        if self.world.is_main:
            last = self.completed == self.total_steps
            bar.write(str(result) if last else f"step {self.completed:,}: {result.on_one_line}")
        return result.metrics

    def caption(self) -> list[Caption] | None:
        """Have rank 0 generate while the others wait; None where it was stopped."""
        captions = list[Caption]()
        if (captioner := self.captioner) is None:
            return captions
        self.world.on_main(lambda: captions.extend(captioner(self.stop_request.is_set)))
        cut = float(self.world.is_main and self.stop_request.is_set())
        return None if self.world.sum(torch.tensor(cut, device=self.world.device)) else captions

    def report(self) -> None:
        if self.reporter is not None:
            self.reporter(self.total_steps)

    def save_if_due(self) -> None:
        due = self.completed % self.config.run.save_every == 0 or self.completed == self.total_steps
        if self.world.is_main and (due or self.stopping):
            self.checkpoints.save(
                self.completed,
                self.position,
                self.projector_bytes,
                self.optimizer,
                self.session.must_match,
                asdict(self.config),
            )

    def metrics_log(self) -> AbstractContextManager[MetricsLog | None]:
        if not self.world.is_main:
            return nullcontext()
        return closing(MetricsLog(self.output, self.completed, open_trackers(self.config, self.completed)))

    def progress(self) -> "tqdm[Any]":
        steps = {"total": self.total_steps, "initial": self.completed}
        return progress_bar(**steps, desc="train", unit="step", disable=not self.world.is_main)
