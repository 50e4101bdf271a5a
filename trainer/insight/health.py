"""Problems of a run: spikes of loss and gradient, a rising loss, plateaus, slower steps, waiting, an idle GPU,
recompilation, nearly full memory.

A check is a pure function of the newest steps' figures. A problem is reported when it begins: at a step that shows it
after WINDOW steps that did not.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from cache_store.program.gpu_use import GpuMeter
from trainer.run.folder import GPU_USE
from trainer.run.memory import gpu_uuid, memory_bytes
from trainer.run.observers import Metrics, Observer, StepDone
from trainer.run.session import Session

WINDOW = 50
"""Steps whose medians are compared."""

SPIKE = 6.0
"""A loss is a spike if it is more than this many standard deviations above the running median."""

NORMAL = 1.4826
"""Standard deviation of normal noise, as a multiple of the median deviation, which a spike hardly changes."""

LEAST_SPIKE, EARLY_SPIKE = 0.1, 1.0
"""Least deviation of a spike, as a share of the median loss: in a full WINDOW, and before there are so many steps."""

GRADIENT_SPIKE = 10.0
"""A gradient norm is a spike if it is above this many times the running median."""

LEAST_RISE, RISE = 0.1, 1.5
"""Least rise of the median loss of WINDOW steps: as a share, and in standard deviations of the losses."""

PLATEAU_STEPS = 400
"""Steps whose second half's median loss must be below the first half's."""

LEAST_FALL = 0.001
"""Least fall of the median loss, as a share, from one half of PLATEAU_STEPS to the next."""

SLOWER = 0.7
"""Throughput has fallen if it is below this share of the run's best; both are medians of WINDOW steps."""

MOST_WAITING = 0.05
"""Largest share of a step spent waiting for data."""

LEAST_GPU_USE = 0.8
"""Least share of time in which the GPU should be busy."""

COMPILE_STEPS = 20
"""Steps after which every planned length is expected to be compiled."""

MOST_MEMORY = 0.95
"""Largest share of the memory that a step may take."""

History = Sequence[Mapping[str, float]]
"""Figures of the newest steps, at most PLATEAU_STEPS."""


class Health(Observer):
    """Adds how busy the GPU is to a step's figures, and each problem to the alerts of the step that shows it first."""

    def __init__(self, session: Session) -> None:
        self.watch, self._device = Watch(memory_bytes(session.world.device)), session.world.device
        self._meter = GpuMeter(None)  # reads nothing before the run begins
        self._is_compiled = session.config.run.compile != "none"

    def begin(self, completed: int) -> None:
        self._meter = GpuMeter(gpu_uuid(self._device))

    def close(self) -> None:
        self._meter.close()

    def after_step(self, step: StepDone) -> None:
        if step.metrics and not step.diverged:
            if readings := self._meter.take():
                step.metrics[GPU_USE] = fmean(readings)
            if self._is_compiled:
                from torch._dynamo.utils import counters  # takes seconds to import

                step.metrics["compiled_graphs"] = counters["stats"]["unique_graphs"]
            step.alerts.extend(self.watch(step.metrics))


class Watch:
    """Keeps a run's newest figures, and since how many steps each problem is gone."""

    def __init__(self, memory_bytes: int | None = None) -> None:
        self._memory = memory_bytes
        self._steps: deque[Metrics] = deque(maxlen=PLATEAU_STEPS)
        self._best = 0.0
        self._normal_steps = dict[str, int]()

    def __call__(self, metrics: Metrics) -> list[str]:
        self._steps.append(metrics)
        steps = list(self._steps)
        losses = values(steps, "loss")
        problems = {
            "spike": spike(losses),
            "rise": rise(losses),
            "gradient": gradient_spike(values(steps, "grad_norm")),
            "plateau": plateau(losses),
            "throughput": self._slowdown(values(steps, "samples_per_s")),
            "waiting": waiting(values(steps, "data_wait_share")),
            "gpu": idle_gpu(values(steps, GPU_USE)),
            "compilation": recompilation(values(steps, "compiled_graphs")),
            "memory": full_memory(metrics.get("peak_memory_bytes", 0), self._memory),
        }
        normal = {name: self._normal_steps.get(name, WINDOW) for name in problems}
        self._normal_steps = {name: 0 if problem else normal[name] + 1 for name, problem in problems.items()}
        return [problem for name, problem in problems.items() if problem and normal[name] >= WINDOW]

    def _slowdown(self, rates: Sequence[float]) -> str | None:
        if len(rates) < WINDOW:
            return None
        now = median(rates[-WINDOW:])
        self._best = max(self._best, now)
        if now >= SLOWER * self._best:
            return None
        return (
            f"throughput fell to {now:.3g} samples/s, {now / self._best:.0%} of the run's best: who shares the machine?"
        )


def values(steps: History, name: str) -> list[float]:
    """List the figure's values; those of skipped steps, which are not finite, are left out."""
    return [step[name] for step in steps if name in step and math.isfinite(step[name])]


def spike(losses: Sequence[float]) -> str | None:
    """Compare the newest loss with the median of those before."""
    before = losses[-WINDOW - 1 : -1]
    if not before:
        return None
    middle, least = median(before), LEAST_SPIKE if len(before) == WINDOW else EARLY_SPIKE
    deviation = SPIKE * NORMAL * median(abs(loss - middle) for loss in before)
    if losses[-1] - middle <= max(deviation, least * abs(middle)):
        return None
    return (
        f"loss spike: {losses[-1]:.4g}, the median of {len(before)} steps before is {middle:.4g}; if spikes recur, "
        "lower optim.lr or optim.max_grad_norm"
    )


def gradient_spike(norms: Sequence[float]) -> str | None:
    """Compare the newest gradient norm, before clipping, with the median of those before."""
    before = norms[-WINDOW - 1 : -1]
    if not before or norms[-1] <= GRADIENT_SPIKE * (middle := median(before)):
        return None
    return (
        f"gradient norm {norms[-1]:.4g}: the median of {len(before)} steps before is {middle:.4g}; if it stays high or "
        "the loss rises, lower optim.lr"
    )


def rise(losses: Sequence[float]) -> str | None:
    """Compare the median of the newest WINDOW losses with the lowest of the windows before."""
    windows = [losses[end - WINDOW : end] for end in range(len(losses), WINDOW - 1, -WINDOW)]
    if len(windows) < 2:
        return None
    now, (lowest, before) = median(windows[0]), min((median(window), window) for window in windows[1:])
    deviation = NORMAL * median(abs(loss - lowest) for loss in before)
    if now - lowest <= max(LEAST_RISE * abs(lowest), RISE * deviation):
        return None
    return f"loss rises: the median of {WINDOW} steps is {now:.4g}, it was {lowest:.4g}; lower optim.lr"


def plateau(losses: Sequence[float]) -> str | None:
    if len(losses) < PLATEAU_STEPS:
        return None
    half = PLATEAU_STEPS // 2
    earlier, later = median(losses[-PLATEAU_STEPS:-half]), median(losses[-half:])
    if later < earlier * (1 - LEAST_FALL):
        return None
    return f"plateau: the median loss of {half} steps is {later:.4g}, that of the {half} before was {earlier:.4g}"


def waiting(shares: Sequence[float]) -> str | None:
    if len(shares) < WINDOW or (share := median(shares[-WINDOW:])) <= MOST_WAITING:
        return None
    return f"steps wait for data {share:.0%} of their time: see `trainer profile`"


def idle_gpu(shares: Sequence[float]) -> str | None:
    if len(shares) < WINDOW or (share := median(shares[-WINDOW:])) >= LEAST_GPU_USE:
        return None
    return f"the GPU is busy {share:.0%} of the time: see `trainer profile`"


def recompilation(graphs: Sequence[float]) -> str | None:
    if len(graphs) <= COMPILE_STEPS or graphs[-1] == graphs[-2]:
        return None
    return f"compiled again: {graphs[-1]:.0f} graphs, {graphs[-1] - graphs[-2]:.0f} more than after the step before"


def full_memory(peak: float, memory: int | None) -> str | None:
    if memory is None or peak <= MOST_MEMORY * memory:
        return None
    return (
        f"memory: a step took {peak / 2**30:.1f} of {memory / 2**30:.1f} GiB; a longer text may not fit: raise "
        "data.accumulate, or set run.gradient_checkpointing"
    )
