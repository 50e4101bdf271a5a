"""A run as the terminal shows it: a bar, validations and captions."""

from typing import Any

from tqdm import tqdm

from cache_store.program.progress_bar import progress_bar
from trainer.insight.captions import caption_lines
from trainer.run.observers import Observer, StepDone


class Console(Observer):
    """Shows steps as they are done."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._bar: tqdm[Any] | None = None

    def begin(self, completed: int) -> None:
        self._bar = progress_bar(total=self._total, initial=completed, desc="train", unit="step")

    def after_step(self, step: StepDone) -> None:
        assert self._bar is not None, "a run begins before its first step"
        if step.metrics and not step.diverged:
            figures = {"loss": f"{step.metrics['loss']:.3f}", "samples_s": f"{step.metrics['samples_per_s']:.1f}"}
            self._bar.set_postfix(figures, refresh=False)
            self._bar.update()
        said = [f"step {step.number:,}: {alert}" for alert in step.alerts]
        if step.validation.summary:
            said.append(step.validation.summary)
        said += [line for caption in step.validation.captions for line in caption_lines(caption)]
        if said:
            self._bar.write("\n".join(said))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
