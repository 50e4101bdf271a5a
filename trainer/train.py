"""A training run from top to bottom: begin or resume, then step by step, until the projector is written.

A step takes a batch, computes gradients, clips and applies them (`trainer/run/update.py`), validates, logs and saves.
A run can stop after any step and resumes exactly there.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from cache_store.errors import EncodeOnceError, Interrupted
from cache_store.messages import counted, differences_between
from cache_store.program.gpu_use import GpuMeter
from cache_store.program.output_file import refuse_inside
from cache_store.program.running import stop_on_signals
from cache_store.storage.claim import claim_folder
from cache_store.storage.threads import STOP_REQUEST
from trainer.config import TrainConfig
from trainer.data.batches import StepBatch
from trainer.data.prefetch import prefetched
from trainer.data.stream import LatentSource
from trainer.insight.captioner import make_captioner
from trainer.insight.health import Watch
from trainer.insight.log import LogStep, announce, open_log, refuse_missing
from trainer.model.model import phase
from trainer.model.projector_file import CONFIG_FILE, PROJECTOR_FILE, ProjectorConfig, projector_bytes
from trainer.run.checkpoint import (
    CheckpointFolder,
    CheckpointState,
    find_checkpoint,
    load_optimizer,
    refuse_other_run,
    restore_heads,
    restore_projectors,
)
from trainer.run.figures import Answered, Captioner, Metrics, Validation
from trainer.run.folder import (
    GPU_USE,
    checkpoints_of,
    has_run,
    read_records,
    refuse_foreign_output,
    write_changed,
    write_config,
)
from trainer.run.load_projector import initial_projector
from trainer.run.memory import fit_memory, gpu_uuid, memory_bytes, peak_memory_bytes
from trainer.run.parallel import World
from trainer.run.session import Session
from trainer.run.update import Update, Updater
from trainer.run.validation import CutShortError, sample_names, shuffle_test

MOST_SKIPPED = 10
"""Steps skipped in a row after which a run with `run.nonfinite: skip` stops."""

MOST_THREADS = 8
"""Most threads that read batches ahead; they are added while steps wait."""


def train(config: TrainConfig, world: World, source: LatentSource | None = None) -> None:
    """Train to the last step, or raise Interrupted after a checkpoint; `source` is read in place of the cache."""
    world.on_main(lambda: refuse_impossible(config, world.size))
    with claim_folder(config.run.folder) if world.is_main else nullcontext():
        checkpoints = checkpoints_of(config.run)
        start = find_checkpoint(checkpoints)
        session = Session(config, world)
        if start is not None:
            refuse_other_run(*start, session.must_match, config)
        session.prepare(source, start=initial_projector(session) if start is None else None)
        fit_memory(session)
        run = TrainingRun(session, checkpoints, make_captioner(session))
        config.optim.refuse_endless_warmup(run.total_steps)
        announce(session)
        if start is not None:
            run.resume(*start)
        run.run()


def refuse_impossible(config: TrainConfig, world_size: int) -> None:
    config.data.refuse_undivided(world_size)
    if config.run.max_steps is not None:  # otherwise the number of steps is known only after tokenising
        config.optim.refuse_endless_warmup(config.run.max_steps)
    refuse_missing(config)
    for cache in config.all_caches:
        refuse_inside("run.output", config.run.folder, cache)
    refuse_foreign_output(config)


class TrainingRun:
    """The state of a run between steps, and its step."""

    def __init__(self, session: Session, checkpoints: CheckpointFolder, captioner: Captioner | None = None) -> None:
        self.session, self.checkpoints, self.captioner = session, checkpoints, captioner
        self.config, self.world = session.config, session.world
        self.output = self.config.run.folder
        self.model = session.model
        self.total_steps = self.config.run.total_steps(len(session.split.train), self.config.data.batch_size)
        self.updater = Updater(session, self.total_steps)
        self.started_from = session.started_from
        self.completed = 0
        """Steps done, skipped ones too."""
        self.skipped = 0
        """Latest steps in a row whose figures were not finite."""
        self.stopping = False
        """Whether the run ends after this step; the same on all ranks."""
        self.watch = Watch(memory_bytes(self.world.device))
        self.meter = GpuMeter(None)
        self.log_step: LogStep = lambda *_: None
        """Logs a step on rank 0, while the run is open."""

    # The run: from a checkpoint or the start to the projector.

    def resume(self, path: Path, state: CheckpointState) -> None:
        self.started_from = restore_projectors(path, self.model.projectors).training.started_from
        restore_heads(path, self.model.reconstruction)
        load_optimizer(path, self.updater.optimizer)
        self.completed = state.step
        self.world.say(f"resuming after step {state.step:,} of {self.total_steps:,}, from {path}")
        for name, before, now in differences_between(state.config, asdict(self.config)):
            self.world.say(f"  changed since then: {name}: {before} → {now}")

    def run(self) -> None:
        """Do the remaining steps, then write the projector for use."""
        lacks_validation = self.lacks_validation()
        remaining = self.completed < self.total_steps or lacks_validation
        if self.world.is_main and (remaining or not has_run(self.config.run)):
            write_config(self.config)
        if remaining:
            self.train_to_the_end(lacks_validation)
        else:
            self.world.say(f"nothing to do: {self.completed:,} steps are done, and the run has {self.total_steps:,}")
        if self.world.is_main:
            self.publish_projector()
        self.world.say(f"trained {counted(self.completed, 'step')}: {self.output / PROJECTOR_FILE}")

    def train_to_the_end(self, lacks_validation: bool) -> None:
        with stop_on_signals(), ExitStack() as stack:
            if self.world.is_main:
                self.log_step = stack.enter_context(open_log(self.config, self.completed, self.total_steps))
                self.meter = stack.enter_context(closing(GpuMeter(gpu_uuid(self.world.device))))
            if lacks_validation:
                self.log_step(self.completed, {}, self.validate(), ())
            steps = range(self.completed, self.total_steps)
            loader = self.session.loader
            with closing(prefetched(loader, steps, loader.threads, MOST_THREADS)) as batches:
                for _ in steps:
                    self.one_step(batches)

    def publish_projector(self) -> None:
        # A rerun does so too: a kill may come before this.
        for name, data in ((CONFIG_FILE, self.projector_config.as_json), (PROJECTOR_FILE, self.projector_bytes)):
            write_changed(self.output / name, data)

    # A step.

    def one_step(self, batches: Iterator[StepBatch]) -> None:
        """Do a step, then the validation, log and checkpoint that are due; a kill at any point loses nothing."""
        began = time.perf_counter()
        with phase("data wait"):
            batch = next(batches)
        waited = time.perf_counter() - began
        update = self.updater(batch, self.completed, stop=STOP_REQUEST.is_set())
        self.stopping |= update.stops
        self.skipped = 0 if update.is_finite else self.skipped + 1
        diverged = not update.is_finite and not (self.config.run.nonfinite == "skip" and update.is_harmless)
        self.completed += not diverged
        metrics = update.metrics | self.pace(batch, time.perf_counter() - began, waited)
        validation, cut_short = Validation(), False
        if self.validation_due and not diverged:
            try:
                validation = self.validate()
            except CutShortError:
                cut_short = True
        self.stopping |= cut_short or self.skipped == MOST_SKIPPED
        alerts = []
        if self.skipped and not diverged:
            alerts.append(f"skipped: {update.figures}; samples {sample_names(self.session, batch.numbers)}")
        if self.world.is_main and not diverged:
            metrics |= self.device_figures()
            alerts += self.watch(metrics)
        self.log_step(int(metrics["step"]), metrics, validation, alerts)
        if diverged:
            raise self.divergence(update, batch)
        self.save_if_due()
        if self.skipped == MOST_SKIPPED:
            raise EncodeOnceError(
                f"step {self.completed:,}: {MOST_SKIPPED} steps in a row were skipped, none with finite figures; the "
                "state before them is saved: try a lower optim.lr, and see that the cache is sound with "
                "`cache-store verify CACHE --level deep`"
            )
        if cut_short or (self.stopping and self.completed < self.total_steps):
            raise Interrupted(f"after step {self.completed:,} of {self.total_steps:,}; run the same command to go on")

    def pace(self, batch: StepBatch, elapsed_s: float, waited_s: float) -> Metrics:
        world = self.model.projectors.count(batch.micro_batches[0].latents)
        tokens = len(batch.numbers) * world + batch.text_tokens
        return {
            "epoch": self.position / len(self.session.split.train),
            "position": self.position,
            "tokens": tokens,
            "passes": len(batch.micro_batches),
            "samples_per_s": self.config.data.batch_size / elapsed_s,
            "tokens_per_s": tokens / elapsed_s,
            "data_wait_share": waited_s / elapsed_s,
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
        }

    def device_figures(self) -> Metrics:
        readings, figures = self.meter.take(), Metrics()
        if readings:
            figures[GPU_USE] = fmean(readings)
        if self.config.run.compile != "none":
            from torch._dynamo.utils import counters  # takes seconds to import

            figures["compiled_graphs"] = counters["stats"]["unique_graphs"]
        return figures

    def divergence(self, update: Update, batch: StepBatch) -> EncodeOnceError:
        saved = max(self.checkpoints.steps(), default=0)
        again = f"; a rerun resumes from step {saved}: if it diverges again, delete that checkpoint" if saved else ""
        return EncodeOnceError(
            f"step {update.metrics['step']} diverged: {update.figures}; try a lower optim.lr{again}\n"
            f"  samples  {sample_names(self.session, batch.numbers)}"
        )

    # Validation.

    @property
    def validation_due(self) -> bool:
        last, regular = self.completed == self.total_steps, self.completed % self.config.run.eval_every == 0
        return self.completed > 0 and (last or regular) and len(self.session.split.validation) > 1

    def validate(self) -> Validation:
        """Measure loss and accuracy, and caption some samples; CutShortError if a rank is stopped."""
        if self.stopping:
            raise CutShortError
        result = shuffle_test(self.session, STOP_REQUEST.is_set)
        summary = f"step {self.completed:,}: {result.on_one_line}"
        return Validation(
            result.metrics, self.caption(), str(result) if self.completed == self.total_steps else summary
        )

    def caption(self) -> list[Answered]:
        """Generate captions on rank 0 while the others wait, or on all ranks in step."""
        captions = list[Answered]()
        if (captioner := self.captioner) is None:
            return captions
        stopped = self.session.stop_check(STOP_REQUEST.is_set)
        if self.session.in_step:
            captions.extend(captioner(stopped))
        else:
            self.world.on_main(lambda: captions.extend(captioner(stopped)))
        captions_here = self.session.in_step or self.world.is_main
        if self.world.any(captions_here and STOP_REQUEST.is_set()):
            raise CutShortError
        return captions

    def lacks_validation(self) -> bool:
        """Return whether, by rank 0's log, the run was stopped before the validation after its last step."""
        logged: Metrics = {}
        if self.world.is_main and self.validation_due:
            logged = next((each for each in read_records(self.output) if each["step"] == self.completed), {})
        return self.world.any(bool(logged) and "val_loss" not in logged)

    # Checkpoints, and the projector's description.

    def save_if_due(self) -> None:
        due = self.completed % self.config.run.save_every == 0 or self.completed == self.total_steps
        if self.world.is_main and (due or self.stopping):
            self.checkpoints.save(
                self.completed,
                self.position,
                self.projector_bytes,
                self.updater.optimizer,
                self.session.must_match,
                asdict(self.config),
                self.model.reconstruction,
            )

    @property
    def position(self) -> int:
        return self.completed * self.config.data.batch_size

    @property
    def projector_config(self) -> ProjectorConfig:
        described, done = self.session.projector_config, {"steps": self.completed, "samples": self.position}
        training = replace(described.training, **done, started_from=self.started_from)
        return replace(described, training=training)

    @property
    def projector_bytes(self) -> bytes:
        return projector_bytes(self.model.projectors, self.projector_config)
