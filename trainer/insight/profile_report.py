"""A profile as pages, `profile.md` and `profile.html`, with advice that quotes the number it follows from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from cache_store.gallery.page import page_template

from cache_store.storage.local import write_file
from trainer.insight.profile_parts import Part, Pass
from trainer.insight.profile_steps import TRACE_FILE, WAIT, WARM_UP, Profile, as_record

WAITING, IDLE, NORMS, RECOMPUTED, LOGITS, LOW_FLOPS = 0.05, 0.10, 0.15, 0.05, 0.20, 0.30
"""Shares beyond which advice is given."""

LEAST_COST = 0.01
"""Share of a step that recording is said to cost; less is noise."""

TOP = 20
"""Operations shown."""

PASSES: tuple[Pass, ...] = get_args(Pass)


@dataclass(frozen=True)
class Table:
    """One table of the report; `bars` has a share in [0, 1] for each row."""

    title: str
    lead: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Sequence[float]


def write_profile(measured: Profile, folder: Path, name: str) -> None:
    """Write both pages, and the figures as JSON."""
    facts, advised, tables = facts_of(measured), list(advice(measured)), tables_of(measured)
    page = page_template("trainer.insight", "profile.html")
    html = page.render(name=name, facts=facts, advice=advised, tables=tables)
    write_file(folder / "profile.md", markdown(name, facts, advised, tables).encode())
    write_file(folder / "profile.html", html.encode())
    write_file(folder / "profile.json", as_record(measured).encode() + b"\n")


def facts_of(measured: Profile) -> list[tuple[str, str]]:
    return [
        ("device", measured.device),
        ("steps", f"{measured.steps} recorded, after {WAIT} waiting and {WARM_UP} of warm-up"),
        ("a step", f"{measured.unrecorded_s:.4g} s; {measured.step_s:.4g} s while recorded ({cost_of(measured)})"),
        ("samples/s", f"{measured.samples / measured.unrecorded_s:.4g}"),
        ("tokens/s", f"{measured.tokens / measured.unrecorded_s:.4g}, and {measured.padding:.1%} more are padding"),
        ("FLOPs a step", f"{measured.flops:.4g}, by matrix products and attention, recomputed ones too"),
        ("matmul peak", f"{measured.peak_flops:.4g} FLOP/s, measured here in the run's precision"),
        ("share of the peak", f"{measured.flop_share:.1%}"),
        ("encoder", "live, in the step" if measured.live_encoder else "none: samples come from the cache"),
        ("trace", f"{TRACE_FILE}: chrome://tracing, ui.perfetto.dev, TensorBoard's PyTorch profiler"),
    ]


def cost_of(measured: Profile) -> str:
    """Return the share that recording adds to a step; other work on the machine may hide it."""
    slower = measured.step_s / measured.unrecorded_s - 1
    return f"{slower:+.0%}" if slower >= LEAST_COST else "the cost of recording is not measurable"


def tables_of(measured: Profile) -> list[Table]:
    return [time_table(measured), operation_table(measured), memory_table(measured)]


def time_table(measured: Profile) -> Table:
    whole = measured.step_s * measured.steps
    phases: dict[str, dict[str, float]] = {}
    for part in measured.parts:
        phases.setdefault(part.phase, dict.fromkeys(PASSES, 0.0))[part.which] += time_of(measured, part)
    if measured.idle_s is not None:
        phases["idle"] = {**dict.fromkeys(PASSES, 0.0), "forward": measured.idle_s * measured.steps}
    ordered = sorted(phases.items(), key=lambda each: -sum(each[1].values()))
    rows = [
        [name, *(f"{1e3 * times[each] / measured.steps:.2f}" for each in PASSES), f"{sum(times.values()) / whole:.1%}"]
        for name, times in ordered
    ]
    lead = "Milliseconds of a step, as self time: a part within another counts only there."
    header = ["part", *PASSES, "share"]
    return Table("Time", lead, header, rows, [sum(times.values()) / whole for _, times in ordered])


def operation_table(measured: Profile) -> Table:
    whole = measured.step_s * measured.steps
    on_device = measured.idle_s is not None
    found = [(each, each.device_s if on_device else each.host_s) for each in measured.operations[:TOP]]
    rows = [
        [
            f"`{each.name}`",
            f"{each.calls / measured.steps:g}",
            f"{1e3 * time / measured.steps:.2f}",
            f"{time / whole:.1%}",
        ]
        for each, time in found
    ]
    lead = "The operations that took the most time themselves, without the operations that they call."
    return Table(
        "Operations", lead, ["operation", "calls a step", "ms a step", "share"], rows, [t / whole for _, t in found]
    )


def memory_table(measured: Profile) -> Table:
    whole = sum(measured.memory.values())
    rows = [[name, f"{size / 2**20:,.2f}", f"{size / whole:.1%}"] for name, size in measured.memory.items()]
    shares = [size / whole for size in measured.memory.values()]
    if measured.peak_bytes is not None:
        rows.append(["peak of the allocator", f"{measured.peak_bytes / 2**20:,.2f}", ""])
        shares.append(0.0)
    lead = "MiB when the forward half of a pass is done, the most that a step holds at once; each storage once."
    return Table("Memory", lead, ["part", "MiB", "share"], rows, shares)


def share_of(measured: Profile, phase: str, which: Pass | None = None) -> float:
    """Return the share of a step's time that a phase takes, in one pass or in all."""
    times = [part for part in measured.parts if part.phase == phase and which in (None, part.which)]
    return sum(time_of(measured, part) for part in times) / (measured.step_s * measured.steps)


def time_of(measured: Profile, part: Part) -> float:
    """Return the seconds of a part: the device's on a GPU, except for waiting and decoding, which the host does."""
    on_host = measured.idle_s is None or part.phase in ("data wait", "image decoding")
    return part.host_s if on_host else part.device_s


def advice(measured: Profile) -> Iterator[str]:
    shares = {phase: share_of(measured, phase) for phase in {part.phase for part in measured.parts}}
    encoding = shares.get("live encoder", 0) + shares.get("image decoding", 0)
    if encoding:
        left = measured.step_s * (1 - encoding)
        yield (
            f"encoding live {encoding:.0%}: from a cache a step takes {left:.3g} s in place of {measured.step_s:.3g} s"
        )
    elif (wait := shares.get("data wait", 0)) > WAITING:
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
        yield f"recomputed {recomputed:.0%}: if memory allows, use a lighter run.gradient_checkpointing"
    kept = {name: size for name, size in measured.memory.items() if name.startswith("kept")}
    logits = sum(size for name, size in kept.items() if name.endswith("logits and loss"))
    if kept and logits / sum(kept.values()) > LOGITS:
        yield f"logits {logits / sum(kept.values()):.0%} of what is kept: run.loss_chunk bounds them"
    if measured.idle_s is not None and measured.flop_share < LOW_FLOPS:
        yield f"{measured.flop_share:.0%} of the matmul peak: take more samples a pass, as far as memory allows"


def markdown(name: str, facts: Sequence[tuple[str, str]], advised: Sequence[str], tables: Sequence[Table]) -> str:
    lines = [f"# Profile: {name}", "", *rows_of(["", ""], facts), "", "## Advice", ""]
    lines += [f"- {each}" for each in advised] or ["Nothing stands out."]
    for table in tables:
        lines += ["", f"## {table.title}", "", table.lead, "", *rows_of(table.header, table.rows)]
    return "\n".join(lines) + "\n"


def markdown_summary(measured: Profile) -> str:
    """Return the table of times and the advice, for a terminal."""
    table = time_table(measured)
    return "\n".join([*rows_of(table.header, table.rows), *advice(measured)])


def rows_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(each)} |" for each in (header, ["---"] * len(header), *rows)]
