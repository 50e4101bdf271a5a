"""Advice from a profile; each piece quotes the number that it follows from."""

from collections.abc import Iterator

from trainer.insight.profiling.measure import Profile

WAIT, IDLE, NORMS, PADDING, RECOMPUTED, LOGITS, LOW_FLOPS = 0.05, 0.10, 0.15, 0.10, 0.05, 0.20, 0.30
"""Shares from which something is advised."""


def share_of(measured: Profile, phase: str, which: str | None = None) -> float:
    """Share of a step's time that a phase takes, in one pass or in all."""
    times = [part for part in measured.parts if part.phase == phase and which in (None, part.which)]
    return sum(time_of(measured, part) for part in times) / (measured.step_s * measured.steps)


def time_of(measured: Profile, part: object) -> float:
    """Time of a part: the device's, where it is another than the host; waiting is the host's."""
    host, device, phase = (getattr(part, name) for name in ("host_s", "device_s", "phase"))
    return float(host if measured.idle_s is None or phase in ("data wait", "image decoding") else device)


def advice(measured: Profile) -> Iterator[str]:
    shares = {phase: share_of(measured, phase) for phase in {part.phase for part in measured.parts}}
    encoding = shares.get("live encoder", 0) + shares.get("image decoding", 0)
    if encoding:
        left = measured.step_s * (1 - encoding)
        yield (
            f"encoding live {encoding:.0%}: from a cache a step takes {left:.3g} s in place of {measured.step_s:.3g} s"
        )
    elif (wait := shares.get("data wait", 0)) > WAIT:
        yield (
            f"data wait {wait:.0%}: copy the cache to a disk of this machine (`cache-store copy`), or set "
            "data.shuffle_block, or data.cache_dir for one at a URL"
        )
    if measured.idle_s is not None and (idle := measured.idle_s / measured.step_s) > IDLE:
        yield f"device idle {idle:.0%}: set run.compile: layers, or take more samples a pass (lower data.accumulate)"
    if (norms := shares.get("norms", 0)) > NORMS:
        yield f"norms {norms:.0%}: run.compile: layers fuses what they read and write"
    recomputed = sum(share_of(measured, phase, "recomputed") for phase in shares)
    if recomputed > RECOMPUTED:
        yield f"recomputed {recomputed:.0%}: where memory allows, a lighter run.gradient_checkpointing"
    if measured.padding > PADDING:
        yield f"padding {measured.padding:.0%} of tokens: data.group_lengths puts texts of a length into one pass"
    kept = {name: size for name, size in measured.memory.items() if name.startswith("kept")}
    logits = sum(size for name, size in kept.items() if name.endswith("logits and loss"))
    if kept and logits / sum(kept.values()) > LOGITS:
        yield f"logits {logits / sum(kept.values()):.0%} of what is kept: run.loss_chunk bounds them"
    if measured.idle_s is not None and measured.flop_share < LOW_FLOPS:
        yield f"{measured.flop_share:.0%} of the matmul peak: take more samples a pass, as far as memory allows"
