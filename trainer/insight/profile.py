"""The command `profile`: where the time and the memory of a training step go, as one page of markdown.

A part of a step is a phase (`trainer.model.model.phase`) and a pass. A backward operation belongs to the phase of the
forward one whose sequence number autograd gave it; a recomputed operation lies in a phase within the backward pass.
Times are self times, so nothing counts twice, and on a CPU the parts sum to the steps' time.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.profiler import ProfilerActivity, record_function, schedule
from torch.profiler import profile as Profiler

from cache_store.errors import ConfigError
from cache_store.program.output_file import refuse_inside
from cache_store.storage.local import write_file
from cache_store.storage.publish import make_folder
from trainer.config import TrainConfig
from trainer.data.batches import StepBatch
from trainer.data.prefetch import prefetched
from trainer.model.model import PREFIX, Phase, WorldModel, phase
from trainer.run.memory import device_name, fit_memory, peak_memory_bytes
from trainer.run.parallel import World
from trainer.run.session import Session
from trainer.run.update import Updater

Pass = Literal["forward", "backward", "recomputed"]
Times = dict[str, dict[Pass, float]]
"""Seconds of each phase in each pass."""

REST = "rest of the step"
"""Operations outside every phase."""

STEP, BACKWARD = "ProfilerStep", "autograd::engine"
"""Beginnings of the names of events that span a step, and that run a backward operation."""

ON_HOST = "data wait"
"""The phase whose time is the host's, on a GPU too."""

WAIT, WARM_UP = 1, 2
"""Steps before the recorded ones: the first allocates, the profiler starts in the next."""

TRACE_FILE = "profile.pt.trace.json"
"""TensorBoard's profiler finds a trace by this ending."""

MOST_STEPS, TOP = 1_000, 20
"""Steps, since no viewer opens the trace of more; operations shown."""

WAITING, IDLE, NORMS, RECOMPUTED = 0.05, 0.10, 0.15, 0.05
"""Shares beyond which advice is given."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements of some steps; times are seconds."""

    device: str
    steps: int
    step_s: float
    """Mean of the recorded steps."""
    unrecorded_s: float
    """Mean of as many steps without the profiler."""
    times: Times
    """Sums over the recorded steps, on a GPU also of its idle time."""
    operations: Sequence[tuple[str, int, float]]
    """Name, calls and self time of the longest operations, over the recorded steps."""
    samples_per_s: float
    tokens_per_s: float
    peak_bytes: int
    """The most that was allocated on a GPU in a step without the profiler; on a CPU, the process's peak."""

    @property
    def whole_s(self) -> float:
        return self.step_s * self.steps

    def share(self, phase: str) -> float:
        return sum(self.times.get(phase, {}).values()) / self.whole_s


def profile(config: TrainConfig, world: World, steps: int, folder: Path) -> Profile:
    """Write page, figures and trace into `folder`, and print the page; the run's own folder stays as it is."""
    if not 1 <= steps <= MOST_STEPS:
        raise ConfigError(f"steps must be in [1, {MOST_STEPS:,}], got {steps:,}")
    if world.size > 1:
        raise ConfigError("profile runs in one process; unset WORLD_SIZE")
    config.data.refuse_undivided(world.size)
    for cache in config.all_caches:
        refuse_inside("out", folder, cache)
    session = Session(replace(config, run=replace(config.run, max_steps=None)), world).prepare()
    fit_memory(session)
    make_folder(folder)
    measured = profile_steps(session, steps, folder / TRACE_FILE)
    page = "\n".join(page_lines(f"Profile: {folder}", measured)) + "\n"
    write_file(folder / "profile.md", page.encode())
    write_file(folder / "profile.json", json.dumps(asdict(measured), indent=1).encode() + b"\n")
    print(f"{page}\nprofile: {folder / 'profile.md'}, profile.json and {TRACE_FILE}")
    return measured


def profile_steps(session: Session, steps: int, trace: Path) -> Profile:
    """Wait, warm up and record steps, and write the trace; then do as many without the profiler."""
    device, recorded = session.world.device, range(WAIT + WARM_UP + steps)
    unrecorded = range(len(recorded), len(recorded) + steps)
    updater, total = Updater(session, unrecorded.stop), range(unrecorded.stop)
    loader = session.loader
    batches = prefetched(loader, total, loader.threads)
    on_device, seen = device.type == "cuda", list[StepBatch]()

    def one_step(step: int) -> None:
        with phase("data wait"):
            seen.append(next(batches))
        updater(seen[-1], step)

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_device
    plan = schedule(wait=WAIT, warmup=WARM_UP, active=steps, repeat=1)
    with closing(batches), decoder_phases(session.model):
        with Profiler(activities=activities, schedule=plan, record_shapes=True) as profiler:
            for step in recorded:
                one_step(step)
                profiler.step()
        profiler.export_chrome_trace(str(trace))
        peak_memory_bytes(device)
        began = time.perf_counter()
        for step in unrecorded:
            one_step(step)
        unrecorded_s, peak_bytes = (time.perf_counter() - began) / steps, peak_memory_bytes(device)
    events = [each for each in profiler.events() or () if is_on_host(each)]
    spans = [each for each in events if each.name.startswith(STEP)]
    step_s = sum(each.time_range.elapsed_us() for each in spans) / 1e6 / steps
    threads = {each.thread for each in spans}
    times = times_of([each for each in events if on_device or each.thread in threads], on_device=on_device)
    if on_device:
        busy_s = sum(sum(each.values()) for each in times.values())
        times["idle"] = {"forward": max(0.0, step_s * steps - busy_s), "backward": 0.0, "recomputed": 0.0}
    world = session.model.projectors.count(seen[0].micro_batches[0].latents)
    tokens = sum(len(each.numbers) * world + each.text_tokens for each in seen) / len(seen)
    return Profile(
        device=device_name(device),
        steps=steps,
        step_s=step_s,
        unrecorded_s=unrecorded_s,
        times=times,
        operations=operations_of(profiler, on_device=on_device),
        samples_per_s=len(seen[0].numbers) / unrecorded_s,
        tokens_per_s=tokens / unrecorded_s,
        peak_bytes=peak_bytes,
    )


def is_on_host(event: Any) -> bool:
    return str(event.device_type).endswith("CPU")


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
    forward = {each.sequence_nr: phase_above(each) for each in events if ancestor(each, BACKWARD) is None}
    times: Times = defaultdict(lambda: {"forward": 0.0, "backward": 0.0, "recomputed": 0.0})
    for event in events:
        name, which = part_of(event, forward)
        device = on_device and name != ON_HOST
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
    found = ancestor(event, PREFIX)
    return REST if found is None else str(found.name).removeprefix(PREFIX)


def ancestor(event: Any, beginning: str) -> Any:
    while event is not None and not event.name.startswith(beginning):
        event = event.cpu_parent
    return event


def operations_of(profiler: Profiler, *, on_device: bool) -> list[tuple[str, int, float]]:
    time_of = "self_device_time_total" if on_device else "self_cpu_time_total"
    found = [
        (each.key, each.count, getattr(each, time_of) / 1e6)
        for each in profiler.key_averages()
        if is_on_host(each) and not each.key.startswith((PREFIX, STEP, BACKWARD))
    ]
    return sorted(found, key=lambda each: -each[2])[:TOP]


def page_lines(title: str, measured: Profile) -> Iterator[str]:
    per_step, slower = 1e3 / measured.steps, measured.step_s / measured.unrecorded_s - 1
    facts = {
        "device": measured.device,
        "recorded": f"{measured.steps} steps, after {WAIT} waiting and {WARM_UP} of warm-up",
        "a step": f"{measured.unrecorded_s:.4g} s; {measured.step_s:.4g} s while recorded ({slower:+.0%})",
        "samples/s, tokens/s": f"{measured.samples_per_s:.4g}, {measured.tokens_per_s:.4g}",
        "peak memory": f"{measured.peak_bytes / 2**20:,.0f} MiB",
    }
    yield from (f"# {title}", "", *table(("", ""), facts.items()), "", "## Advice", "")
    yield from [f"- {each}" for each in advice(measured)] or ["Nothing stands out."]
    yield from ("", "## Time", "", "Milliseconds of a step, as self time: a part within another counts only there.", "")
    parts = sorted(measured.times, key=measured.share, reverse=True)
    passes = {name: [f"{per_step * each:.2f}" for each in measured.times[name].values()] for name in parts}
    rows = ([name, *passes[name], f"{measured.share(name):.1%}"] for name in parts)
    yield from table(("part", "forward", "backward", "recomputed", "share"), rows)
    yield from ("", "## Operations", "", "Milliseconds of a step that they took themselves.", "")
    rows = (
        [f"`{name}`", f"{calls / measured.steps:g}", f"{per_step * each:.2f}", f"{each / measured.whole_s:.1%}"]
        for name, calls, each in measured.operations
    )
    yield from table(("operation", "calls a step", "ms a step", "share"), rows)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    return (f"| {' | '.join(each)} |" for each in (header, ["---"] * len(header), *rows))


def advice(measured: Profile) -> Iterator[str]:
    if (wait := measured.share("data wait")) > WAITING:
        yield (
            f"data wait {wait:.0%}: copy the cache to a disk of this machine (`cache-store copy`), or set "
            "data.shuffle_block, or data.cache_dir for one at a URL"
        )
    if (idle := measured.share("idle")) > IDLE:
        yield f"device idle {idle:.0%}: set run.compile: layers, or take more samples a pass (lower data.accumulate)"
    if (norms := measured.share("norms")) > NORMS:
        yield f"norms {norms:.0%}: run.compile: layers fuses what they read and write"
    if (recomputed := sum(each["recomputed"] for each in measured.times.values()) / measured.whole_s) > RECOMPUTED:
        yield f"recomputed {recomputed:.0%}: if memory allows, use a lighter run.gradient_checkpointing"
