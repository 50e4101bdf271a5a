"""The parts of a step: which operations belong to each, how long each takes, and what it keeps for the backward pass.

A part is a phase (`trainer/model/phases.py`) and a pass. A backward operation belongs to the phase of the forward one
whose sequence number autograd gave it; a recomputed operation lies in a phase within the backward pass. Times are self
times, so nothing counts twice, and on a CPU the parts sum to the steps' time. Each storage's bytes count once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainer.model.language_model import ON_KEPT
from trainer.model.model import WorldModel
from trainer.model.phases import PREFIX, Phase, open_phases, phase

Pass = Literal["forward", "backward", "recomputed"]

REST = "rest of the step"
"""Operations and bytes outside every phase."""

BACKWARD = "autograd::engine"
"""Beginning of the names of events that run a backward operation."""

STEP = "ProfilerStep"
"""Beginning of the names of events that span a step."""


@contextmanager
def saved_bytes(besides: Iterable[Tensor] = ()) -> Iterator[dict[str, int]]:
    """Count the bytes that autograd and checkpointing keep in the block, by phase.

    `besides` are in memory anyway, such as weights.
    """
    known = {address_of(each) for each in besides}
    found: dict[str, int] = defaultdict(int)
    kept: list[Tensor] = []  # so that no storage's address is used again while the block runs

    def count(tensor: Tensor) -> Tensor:
        if address_of(tensor) not in known:
            known.add(address_of(tensor))
            kept.append(tensor.detach())
            phases = open_phases()
            found[phases[-1] if phases else REST] += tensor.untyped_storage().nbytes()
        return tensor

    ON_KEPT.append(count)
    try:
        with saved_tensors_hooks(count, lambda tensor: tensor):
            yield found
    finally:
        ON_KEPT.remove(count)


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def decoder_phases(model: WorldModel) -> Iterator[None]:
    """Mark attention, MLPs and norms of the language model's layers as they run."""
    handles = []
    for name, module in model.language.decoder.named_modules():
        if (found := phase_of(name.rpartition(".")[2], module)) is not None:
            handles += mark(module, found)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def phase_of(name: str, module: nn.Module) -> Phase | None:
    """Return the phase of a layer's module by its class; norms within attention belong to attention."""
    kind = type(module).__name__
    if kind.endswith(("Attention", "SelfAttention", "Attention2", "Mixer")):
        return "attention"
    if kind.endswith(("MLP", "FeedForward", "SparseMoeBlock", "MoE")) or name in ("mlp", "feed_forward"):
        return "MLP"
    if "Norm" in kind and name not in ("q_norm", "k_norm"):
        return "norms"
    return None


def mark(module: nn.Module, name: Phase) -> list[Any]:
    """Open the phase before the module's forward and close it after, even if it raises; return the hooks."""
    open_marks: list[phase] = []

    def enter(*_: object) -> None:
        open_marks.append(phase(name))
        open_marks[-1].__enter__()

    def leave(*_: object) -> None:
        open_marks.pop().__exit__(None, None, None)

    before = module.register_forward_pre_hook(enter)
    return [before, module.register_forward_hook(leave, always_call=True)]


@dataclass(frozen=True)
class Part:
    """The time of one part over the profiled steps."""

    phase: str
    which: Pass
    host_s: float
    device_s: float


@dataclass(frozen=True)
class Operation:
    """All calls of one operation together."""

    name: str
    calls: int
    host_s: float
    """Self time: without the operations that it calls."""
    device_s: float


def parts_of(events: Sequence[Any]) -> list[Part]:
    """Sum the self times of a profiler's events by part; `events` are of the threads that did the steps."""
    forward = {event.sequence_nr: phase_above(event) for event in events if is_forward(event)}
    sums: dict[tuple[str, Pass], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        if is_host(event):
            total = sums[part_of(event, forward)]
            total[0] += event.self_cpu_time_total / 1e6
            total[1] += event.self_device_time_total / 1e6
    return [Part(name, which, *seconds) for (name, which), seconds in sums.items() if any(seconds)]


def part_of(event: Any, forward: dict[int, str]) -> tuple[str, Pass]:
    above, backward = phase_above(event), backward_above(event)
    if backward is None:
        return above, "backward" if above == "backward" else "forward"
    if above not in ("backward", REST):  # a phase within the backward pass is a forward pass done again
        return above, "recomputed"
    return forward.get(backward.sequence_nr, "backward"), "backward"


def is_host(event: Any) -> bool:
    return str(event.device_type).endswith("CPU")


def is_forward(event: Any) -> bool:
    return event.sequence_nr >= 0 and is_host(event) and backward_above(event) is None


def phase_above(event: Any) -> str:
    """Return the innermost phase around the event, or the event's own."""
    found = ancestor(event, PREFIX)
    return REST if found is None else str(found.name).removeprefix(PREFIX)


def backward_above(event: Any) -> Any:
    return ancestor(event, BACKWARD)


def ancestor(event: Any, beginning: str) -> Any:
    while event is not None and not event.name.startswith(beginning):
        event = event.cpu_parent
    return event


def operations_of(events: Sequence[Any]) -> list[Operation]:
    """Sum events by name, the longest first, without phases and steps."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for event in events:
        if is_host(event) and not event.name.startswith((PREFIX, STEP, BACKWARD)):
            total = sums[event.name]
            total[0] += 1
            total[1] += event.self_cpu_time_total / 1e6
            total[2] += event.self_device_time_total / 1e6
    found = [Operation(name, int(calls), host, device) for name, (calls, host, device) in sums.items()]
    return sorted(found, key=lambda each: (each.device_s, each.host_s), reverse=True)


def busy_s(events: Sequence[Any]) -> float:
    """Return the seconds in which the device worked."""
    spans = sorted(
        (e.time_range.start, e.time_range.end) for e in events if not is_host(e) and not e.is_user_annotation
    )
    busy = end = 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / 1e6
