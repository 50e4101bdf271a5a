"""Profile steps of a run: wait, warm up, record; then time steps without the profiler, and count bytes and FLOPs."""

import json
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.flop_counter import FlopCounterMode

from trainer.data.batches import StepBatch
from trainer.data.prefetch import prefetched
from trainer.insight.profile_parts import (
    STEP,
    Operation,
    Part,
    busy_s,
    decoder_phases,
    operations_of,
    parts_of,
    saved_bytes,
)
from trainer.model.phases import phase
from trainer.run.memory import peak_memory_bytes
from trainer.run.session import Session
from trainer.run.update import Updater

WAIT, WARM_UP = 1, 2
"""Steps before the recorded ones: the first allocates, the profiler starts in the next."""

TRACE_FILE = "profile.pt.trace.json"
"""TensorBoard's profiler finds a trace by this ending."""

PEAK_SIZES = {"cpu": 1_024, "cuda": 8_192}
"""Side of the square matrices whose product measures the peak."""

PEAK_S = 0.5
"""Time for which that product is repeated."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements, summed over all recorded steps unless stated otherwise."""

    device: str
    steps: int
    step_s: float
    """Mean of the recorded steps."""
    unrecorded_s: float
    """Mean of as many steps without the profiler."""
    parts: list[Part]
    operations: list[Operation]
    idle_s: float | None
    """Device time of one step; None on a CPU."""
    samples: int
    """Samples of one step."""
    tokens: int
    """Tokens of one step, on average."""
    padding: float
    """Share of the language model's tokens that are padding."""
    flops: int
    """Floating-point operations of one step, recomputed ones too."""
    peak_flops: float
    """FLOPs per second of a matrix product in the language model's precision."""
    memory: dict[str, int]
    """Bytes at one step's peak, by the part that holds them."""
    peak_bytes: int | None
    """Most that was allocated on a GPU; None on a CPU."""
    live_encoder: bool

    @property
    def flop_share(self) -> float:
        return self.flops / self.unrecorded_s / self.peak_flops


def profile_steps(session: Session, steps: int, folder: Path, *, live_encoder: bool) -> Profile:
    """Do the steps, and write the trace into `folder`; batches are read ahead unless `live_encoder` makes them."""
    traced_steps, total = WAIT + WARM_UP + steps, WAIT + WARM_UP + 2 * steps + 2
    updater, device = Updater(session, total), session.world.device
    with closing(batches_of(session, total, ahead=not live_encoder)) as batches, decoder_phases(session.model):
        traced, seen = trace_steps(updater, batches, steps, folder / TRACE_FILE)
        peak_memory_bytes(device)
        took = [one_step(updater, batches, step)[1] for step in range(traced_steps, total - 2)]
        peak = peak_memory_bytes(device) if device.type == "cuda" else None
        memory = memory_of(session, updater, next(batches))
        flops = flops_of(updater, next(batches))
    recorded = [event for event in traced if event.name.startswith(STEP)]
    threads = {event.thread for event in recorded}
    of_steps = [event for event in traced if device.type == "cuda" or event.thread in threads]
    step_s = sum(event.time_range.elapsed_us() for event in recorded) / 1e6 / max(1, len(recorded))
    tokens, padded = (sum(each) for each in zip(*(tokens_of(session, batch) for batch in seen), strict=True))
    return Profile(
        device=device_name(device),
        steps=steps,
        step_s=step_s,
        unrecorded_s=sum(took) / len(took),
        parts=parts_of(of_steps),
        operations=operations_of(of_steps),
        idle_s=None if device.type != "cuda" else max(0.0, step_s - busy_s(traced) / steps),
        samples=len(seen[0].numbers),
        tokens=round(tokens / len(seen)),
        padding=1 - tokens / padded,
        flops=flops,
        peak_flops=peak_flops(session.model.language.dtype, device),
        memory=memory,
        peak_bytes=peak,
        live_encoder=live_encoder,
    )


def trace_steps(
    updater: Updater, batches: Iterator[StepBatch], steps: int, file: Path
) -> tuple[list[Any], list[StepBatch]]:
    """Wait, warm up and record steps; return the profiler's events and all batches, and write the trace."""
    events = list[Any]()

    def take(profiler: Any) -> None:
        events.extend(profiler.events())
        profiler.export_chrome_trace(str(file))

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (updater.world.device.type == "cuda")
    plan = schedule(wait=WAIT, warmup=WARM_UP, active=steps, repeat=1)
    seen = list[StepBatch]()
    with profile(activities=activities, schedule=plan, on_trace_ready=take, record_shapes=True) as profiler:
        for step in range(WAIT + WARM_UP + steps):
            seen.append(one_step(updater, batches, step)[0])
            profiler.step()
    return events, seen


def batches_of(session: Session, steps: int, *, ahead: bool) -> Generator[StepBatch]:
    if ahead:
        yield from prefetched(session.loader, range(steps), session.loader.threads)
    else:
        yield from map(session.loader, range(steps))


def one_step(updater: Updater, batches: Iterator[StepBatch], step: int) -> tuple[StepBatch, float]:
    began = time.perf_counter()
    with phase("data wait"):
        batch = next(batches)
    updater(batch, step)
    return batch, time.perf_counter() - began


def tokens_of(session: Session, batch: StepBatch) -> tuple[int, int]:
    """Count the tokens that the language model reads in a step, without and with padding."""
    world = len(batch.numbers) * session.model.projectors.count(batch.micro_batches[0].latents)
    padded = sum(each.tokens_NT.numel() for each in batch.micro_batches) * session.world.size
    return world + batch.text_tokens, world + padded


def memory_of(session: Session, updater: Updater, batch: StepBatch) -> dict[str, int]:
    """Count the bytes that one pass holds when its forward half is done, by part."""
    model = session.model
    weights = [*model.language.parameters(), *model.language.buffers()]
    modules = [part for _, part in model.trained_modules()]
    learning = [each for part in modules for each in (*part.parameters(), *part.buffers())]
    moments = updater.optimizer.state_dict()["state"].values()
    states = [each for state in moments for each in state.values() if torch.is_tensor(each)]
    held = {
        "language model": total_bytes(weights),
        "projector": total_bytes(learning),
        "its gradients": total_bytes(updater.parameters),
        "optimizer": total_bytes(states),
    }
    on_device = batch.micro_batches[0].to(session.world.device)
    with saved_bytes([*weights, *learning]) as saved:
        loss = model(on_device).sum()
    del loss
    kept = {f"kept for the backward pass: {name}": size for name, size in sorted(saved.items(), key=lambda e: -e[1])}
    return held | kept


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum over storages, which tensors may share."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def flops_of(updater: Updater, batch: StepBatch) -> int:
    """Count the multiplications and additions of matrix products and attention in one step."""
    name = "_scaled_dot_product_flash_attention_for_cpu"  # torch's own table lacks it
    on_cpu = {
        getattr(torch.ops.aten, name): lambda query, key, *_, **__: attention_flops(query, key, products=2),
        getattr(torch.ops.aten, f"{name}_backward"): lambda _, query, key, *__, **___: attention_flops(
            query, key, products=5
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=on_cpu) as counter:
        updater.compute_gradients(batch, 0)
    updater.optimizer.zero_grad()
    return int(counter.get_total_flops())


def attention_flops(query: torch.Size, key: torch.Size, *, products: int) -> int:
    """Count the operations of `products` products such as queries by keys; masked places count too."""
    samples, heads, length, width = query
    return products * 2 * samples * heads * length * key[2] * width


def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the rate of a large matrix product, in FLOP/s."""
    side = PEAK_SIZES[device.type]
    one, other = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    rate = 0.0
    ends = time.perf_counter() + PEAK_S
    while time.perf_counter() < ends:
        wait_for(device)
        began = time.perf_counter()
        one @ other
        wait_for(device)
        rate = max(rate, 2 * side**3 / (time.perf_counter() - began))
    return rate


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def as_record(measured: Profile) -> str:
    """Return the whole profile as a JSON object."""
    named = {"parts", "operations"}
    plain = {name: value for name, value in vars(measured).items() if name not in named}
    plain |= {name: [vars(each) for each in getattr(measured, name)] for name in named}
    return json.dumps(plain, indent=1)
