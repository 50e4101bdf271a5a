"""The parts of a step: which operations belong to each, and how long each takes.

A part is a phase (`trainer/model/phases.py`) and a pass. A backward operation belongs to the phase of the forward one
whose sequence number autograd gave it; a recomputed operation lies in a phase within the backward pass. Times are self
times, so nothing counts twice, and on a CPU the parts sum to the steps' time.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from torch import nn
from torch.profiler import record_function

from trainer.model.model import WorldModel
from trainer.model.phases import PREFIX, Phase, phase

Pass = Literal["forward", "backward", "recomputed"]
Times = dict[str, dict[Pass, float]]
"""Seconds of each phase in each pass."""

REST = "rest of the step"
"""Operations outside every phase."""

BACKWARD = "autograd::engine"
"""Beginning of the names of events that run a backward operation."""

ON_HOST = ("data wait", "image decoding")
"""Phases whose time is the host's, on a GPU too."""


@contextmanager
def decoder_phases(model: WorldModel) -> Iterator[None]:
    """Mark attention, MLPs and norms of the language model's layers as they run."""
    opened: list[record_function] = []
    with ExitStack() as stack:
        for path, module in model.language.decoder.named_modules():
            if (name := phase_of(path.rpartition(".")[2], module)) is not None:

                def enter(*_: object, name: Phase = name) -> None:
                    opened.append(phase(name).__enter__())  # type: ignore[no-untyped-call]

                def leave(*_: object) -> None:
                    opened.pop().__exit__(None, None, None)

                stack.enter_context(module.register_forward_pre_hook(enter))
                stack.enter_context(module.register_forward_hook(leave, always_call=True))
        yield


def phase_of(name: str, module: nn.Module) -> Phase | None:
    """Return the phase of a layer's module by its class; norms within attention belong to attention."""
    kind = type(module).__name__
    if kind.endswith(("Attention", "SelfAttention", "Attention2", "Mixer")):
        return "attention"
    if kind.endswith(("MLP", "FeedForward", "SparseMoeBlock", "MoE")) or name in ("mlp", "feed_forward"):
        return "MLP"
    return "norms" if "Norm" in kind and name not in ("q_norm", "k_norm") else None


def times_of(events: Sequence[Any], *, on_device: bool) -> Times:
    """Sum the self times of the host's events by phase and pass: the device's, or the host's."""
    forward = {each.sequence_nr: phase_above(each) for each in events if ancestor(each, BACKWARD) is None}
    times: Times = defaultdict(lambda: {"forward": 0.0, "backward": 0.0, "recomputed": 0.0})
    for event in events:
        name, which = part_of(event, forward)
        device = on_device and name not in ON_HOST
        times[name][which] += (event.self_device_time_total if device else event.self_cpu_time_total) / 1e6
    return {name: each for name, each in times.items() if any(each.values())}


def part_of(event: Any, forward: dict[int, str]) -> tuple[str, Pass]:
    above, backward = phase_above(event), ancestor(event, BACKWARD)
    if backward is None:
        return above, "backward" if above == "backward" else "forward"
    if above not in ("backward", REST):  # a phase within the backward pass is a forward pass done again
        return above, "recomputed"
    return (forward.get(backward.sequence_nr, "backward") if backward.sequence_nr >= 0 else "backward"), "backward"


def phase_above(event: Any) -> str:
    """Return the innermost phase around the event, or the event's own."""
    found = ancestor(event, PREFIX)
    return REST if found is None else str(found.name).removeprefix(PREFIX)


def ancestor(event: Any, beginning: str) -> Any:
    while event is not None and not event.name.startswith(beginning):
        event = event.cpu_parent
    return event
