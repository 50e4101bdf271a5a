"""Problems of a run: spikes of loss and gradient, a rising loss, plateaus, slower steps, waiting, an idle GPU,
recompilation, nearly full memory. The checks are a pure function of the newest steps' figures.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from trainer.run.figures import Metrics
from trainer.run.folder import GPU_USE

WINDOW = 50
"""Steps whose medians are compared."""

SPIKE, LEAST_SPIKE, EARLY_SPIKE = 6.0, 0.1, 1.0
"""A loss is a spike if it is this many standard deviations above the running median, and by this share of it: the first
in a full WINDOW, the second before there are so many steps."""

NORMAL = 1.4826
"""Standard deviation of normal noise, as a multiple of the median deviation, which a spike hardly changes."""

GRADIENT_SPIKE, LEAST_RISE, RISE = 10.0, 0.1, 1.5
"""A gradient norm is a spike if it is this many times the running median. Least rise of the median loss of WINDOW
steps: as a share, and in standard deviations of the losses."""

PLATEAU_STEPS, LEAST_FALL = 400, 0.001
"""Least fall of the median loss, as a share, from one half of so many steps to the next."""

SLOWER, MOST_WAITING, LEAST_GPU_USE, MOST_MEMORY = 0.7, 0.05, 0.8, 0.95
"""Limits of a WINDOW's median throughput, as a share of the run's best; of the share of a step spent waiting for data,
of the time in which the GPU is busy, of the memory that a step takes."""

COMPILE_STEPS = 20
"""Steps after which every planned length is expected to be compiled."""


class Watch:
    """Keeps a run's newest figures, and the number of steps since each problem was last seen."""

    def __init__(self, memory_bytes: int | None = None) -> None:
        self._memory, self._best_rate = memory_bytes, 0.0
        self._steps: deque[Metrics] = deque(maxlen=PLATEAU_STEPS)
        self._problem_free = dict[str, int]()

    def __call__(self, metrics: Metrics) -> list[str]:
        """Return the problems that begin at this step: this step has them, the WINDOW steps before had not."""
        self._steps.append(metrics)
        if len(rates := values([*self._steps][-WINDOW:], "samples_per_s")) == WINDOW:
            self._best_rate = max(self._best_rate, median(rates))
        found = dict(problems([*self._steps], self._memory, self._best_rate))
        begun = [problem for name, problem in found.items() if self._problem_free.get(name, WINDOW) >= WINDOW]
        normal = {name: steps + 1 for name, steps in self._problem_free.items()}
        self._problem_free = normal | dict.fromkeys(found, 0)
        return begun


def problems(
    steps: Sequence[Mapping[str, Any]], memory: int | None = None, best_rate: float = math.inf
) -> Iterator[tuple[str, str]]:
    """Yield name and description of each problem that the newest of at most PLATEAU_STEPS steps shows."""
    losses, norms = values(steps, "loss"), values(steps, "grad_norm")
    if (before := losses[-WINDOW - 1 : -1]) and losses[-1] > highest_normal(before):
        yield (
            "spike",
            f"loss spike: {losses[-1]:.4g}, the median of {len(before)} steps before is {median(before):.4g}; if "
            "spikes recur, lower optim.lr or optim.max_grad_norm",
        )
    windows = [losses[end - WINDOW : end] for end in range(len(losses), WINDOW - 1, -WINDOW)]
    if len(windows) > 1:
        now, (lowest, before) = median(windows[0]), min((median(window), window) for window in windows[1:])
        if now - lowest > max(LEAST_RISE * abs(lowest), RISE * deviation(before)):
            yield "rise", f"loss rises: the median of {WINDOW} steps is {now:.4g}, it was {lowest:.4g}; lower optim.lr"
    if (before := norms[-WINDOW - 1 : -1]) and norms[-1] > GRADIENT_SPIKE * median(before):
        yield (
            "gradient",
            f"gradient norm {norms[-1]:.4g}: the median of {len(before)} steps before is {median(before):.4g}; if it "
            "stays high or the loss rises, lower optim.lr",
        )
    if len(losses) == PLATEAU_STEPS:
        half = PLATEAU_STEPS // 2
        earlier, later = median(losses[:half]), median(losses[half:])
        if later >= earlier * (1 - LEAST_FALL):
            yield "plateau", f"plateau: the median loss of {half} steps is {later:.4g}, before it was {earlier:.4g}"
    rate, wait, used = (newest_median(steps, name) for name in ("samples_per_s", "data_wait_share", GPU_USE))
    if rate is not None and rate < SLOWER * best_rate < math.inf:
        share = f"{rate / best_rate:.0%} of the run's best"
        yield "throughput", f"throughput fell to {rate:.3g} samples/s, {share}: who shares the machine?"
    if wait is not None and wait > MOST_WAITING:
        yield "waiting", f"steps wait for data {wait:.0%} of their time: see `trainer profile`"
    if used is not None and used < LEAST_GPU_USE:
        yield "gpu", f"the GPU is busy {used:.0%} of the time: see `trainer profile`"
    graphs = values(steps, "compiled_graphs")
    if len(graphs) > COMPILE_STEPS and (more := graphs[-1] - graphs[-2]):
        yield "compilation", f"compiled again: {graphs[-1]:.0f} graphs, {more:.0f} more than after the step before"
    peak = steps[-1].get("peak_memory_bytes", 0) if steps else 0
    if memory is not None and peak > MOST_MEMORY * memory:
        yield (
            "memory",
            f"memory: a step took {peak / 2**30:.1f} of {memory / 2**30:.1f} GiB; a longer text may not fit: raise "
            "data.accumulate, or set run.gradient_checkpointing",
        )


def values(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """List the figure's values; those of skipped steps, which are not finite, are left out."""
    return [step[name] for step in steps if name in step and math.isfinite(step[name])]


def newest_median(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    found = values(steps, name)[-WINDOW:]
    return median(found) if len(found) == WINDOW else None


def deviation(losses: Sequence[float]) -> float:
    middle = median(losses)
    return NORMAL * median(abs(loss - middle) for loss in losses)


def highest_normal(before: Sequence[float]) -> float:
    least = LEAST_SPIKE if len(before) == WINDOW else EARLY_SPIKE
    return median(before) + max(SPIKE * deviation(before), least * abs(median(before)))
