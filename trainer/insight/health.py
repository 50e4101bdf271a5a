"""Is the run well? Spikes, plateaus, slower steps, waiting and memory that is nearly full: each is said once.

A check is a pure function of the newest steps' figures.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from trainer.run.memory import memory_bytes
from trainer.run.observers import Metrics, Observer, StepDone
from trainer.run.session import Session

WINDOW = 50
"""Steps whose medians are compared."""

SPIKE = 6.0
"""Deviations from the running median, in medians of them, beyond which a loss is a spike."""

LEAST_SPIKE = 0.1
"""Share of the median loss that any step may differ by."""

PLATEAU_STEPS = 400
"""Steps of which the second half's median loss is to be below the first half's."""

LEAST_FALL = 0.001
"""Least fall of the loss, as a share, over half of PLATEAU_STEPS."""

SLOWER = 0.7
"""Share of the run's best throughput, as a median of WINDOW steps, below which it has dropped."""

MOST_WAITING = 0.05
"""Share of a step spent waiting for data."""

COMPILE_STEPS = 20
"""Steps in which every planned length is expected to have come."""

MOST_MEMORY = 0.95
"""Share of the memory."""

History = Sequence[Mapping[str, float]]
"""Figures of the newest steps, at most PLATEAU_STEPS."""


class Health(Observer):
    """Adds what is wrong to the step at which it is seen first."""

    def __init__(self, session: Session) -> None:
        self.watch = Watch(memory_bytes(session.world.device))
        self._is_compiled = session.config.run.compile != "none"

    def after_step(self, step: StepDone) -> None:
        if step.metrics and not step.diverged:
            if self._is_compiled:
                from torch._dynamo.utils import counters  # seconds, for runs that compile

                step.metrics["compiled_graphs"] = counters["stats"]["unique_graphs"]
            step.alerts.extend(self.watch(step.metrics))


class Watch:
    """Remembers a run's newest figures, and what was said of them."""

    def __init__(self, memory_bytes: int | None = None) -> None:
        self._memory = memory_bytes
        self._steps: deque[Metrics] = deque(maxlen=PLATEAU_STEPS)
        self._best = 0.0
        self._said = set[str]()

    def __call__(self, metrics: Metrics) -> list[str]:
        self._steps.append(metrics)
        steps = list(self._steps)
        checks: dict[str, Callable[[], str | None]] = {
            "spike": lambda: spike(values(steps, "loss")),
            "plateau": lambda: plateau(values(steps, "loss")),
            "throughput": lambda: self._throughput(values(steps, "samples_per_s")),
            "waiting": lambda: waiting(values(steps, "data_wait_share")),
            "compilation": lambda: recompiled(values(steps, "compiled_graphs")),
            "memory": lambda: near_full(metrics.get("peak_memory_bytes", 0), self._memory),
        }
        found = {name: said for name, check in checks.items() if name not in self._said and (said := check())}
        self._said |= found.keys()
        return list(found.values())

    def _throughput(self, rates: Sequence[float]) -> str | None:
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
    return [step[name] for step in steps if name in step]


def spike(losses: Sequence[float]) -> str | None:
    """Compare the newest loss with the median of those before."""
    before = losses[-WINDOW - 1 : -1]
    if len(before) < WINDOW:
        return None
    middle = median(before)
    spread = max(median(abs(loss - middle) for loss in before), LEAST_SPIKE * abs(middle) / SPIKE)
    if losses[-1] - middle <= SPIKE * spread:
        return None
    return (
        f"loss spike: {losses[-1]:.4g}, the median of {WINDOW} steps before is {middle:.4g}; where they go on, lower "
        "optim.lr or optim.max_grad_norm"
    )


def plateau(losses: Sequence[float]) -> str | None:
    if len(losses) < PLATEAU_STEPS:
        return None
    half = PLATEAU_STEPS // 2
    earlier, later = median(losses[-PLATEAU_STEPS:-half]), median(losses[-half:])
    if later < earlier * (1 - LEAST_FALL):
        return None
    return f"plateau: the median loss of {half} steps is {later:.4g}, of the {half} before {earlier:.4g}"


def waiting(shares: Sequence[float]) -> str | None:
    if len(shares) < WINDOW or (share := median(shares[-WINDOW:])) <= MOST_WAITING:
        return None
    return f"steps wait for data {share:.0%} of their time: `trainer profile` shows for what"


def recompiled(graphs: Sequence[float]) -> str | None:
    if len(graphs) <= COMPILE_STEPS or graphs[-1] == graphs[-2]:
        return None
    return f"compiled again: {graphs[-1]:.0f} graphs, {graphs[-1] - graphs[-2]:.0f} more than the step before had"


def near_full(peak: float, memory: int | None) -> str | None:
    if memory is None or peak <= MOST_MEMORY * memory:
        return None
    return (
        f"memory: a step took {peak / 2**30:.1f} of {memory / 2**30:.1f} GiB; a longer text may not fit: raise "
        "data.accumulate, or run.gradient_checkpointing"
    )
