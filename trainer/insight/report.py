"""The page that shows whether a run is learning, made from the whole log on disk: a resumed run's page has all steps.

Ids and words are untrusted text: Jinja2 escapes every value that enters the page.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from cache_store.gallery.page import Plot, Scheme, page_template, plot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cache_store.messages import flatten
from cache_store.program.config_file import format_value
from trainer.data.buckets import parts_alike
from trainer.generate.rows import sample_numbers
from trainer.insight.captioner import previews
from trainer.run.folder import CAPTIONS, GPU_USE, NONFINITE, LogLine, read_records, write_changed
from trainer.run.observers import NOTHING, Observer, StepDone
from trainer.run.session import Session
from trainer.run.validation import SIGNIFICANT, is_image_used, verdict

# Axes: S steps of the log.

REPORT_FILE = "report.html"

SHOWN_STEPS = 8
"""Most captions shown of one sample: evenly spaced ones, the first and the newest included."""

POINTS = 300
"""Most points of a curve. With more steps, each point is the mean of several, and a band shows their range."""

LEAST_SPAN = 0.2
"""Least span of an axis of shares, so that a single point lies in its middle."""

LEAST_CHANGE = 0.01
"""Least span of an axis relative to its values; a smaller one has tick labels of many digits, which say nothing."""

INCHES = (5.2, 2.6)
MARGINS = {"left": 0.14, "right": 0.98, "bottom": 0.18, "top": 0.89}

Draw = Callable[[Sequence[LogLine], Axes, Scheme], None]


@dataclass(frozen=True)
class StepCaption:
    """A caption at one step."""

    step: int
    text: str
    is_whole: bool
    is_reference: bool
    """Whether it is the reference, word for word."""


@dataclass(frozen=True)
class CaptionedSample:
    """The captions of one sample, newest first."""

    row: int
    id: str
    prompt: str
    reference: str | None
    preview: np.ndarray | None
    captions: Sequence[StepCaption]


class Report(Observer):
    """Writes the page at each validation, at the end, and if the run diverges."""

    def __init__(self, session: Session, total_steps: int) -> None:
        self._session, self._total = session, total_steps

    def after_step(self, step: StepDone) -> None:
        if step.diverged:
            self.finish()

    def after_save(self, step: StepDone) -> None:
        if step.validation.metrics and not step.is_last:
            self.finish()

    def finish(self) -> None:
        write_report(self._session, self._total)


def write_report(session: Session, total_steps: int) -> None:
    """Write the page unless it is up to date."""
    folder = session.config.run.folder
    write_changed(folder / REPORT_FILE, render(session, read_records(folder), total_steps).encode())


def render(session: Session, records: Sequence[LogLine], total_steps: int) -> str:
    """Render the page as one HTML text that loads nothing from elsewhere."""
    validated = [record for record in records if "val_loss" in record]
    newest = validated[-1] if validated else None
    test = None
    if newest and "val_standard_error" in newest:
        test = newest["val_loss_shuffled"] - newest["val_loss"], newest["val_standard_error"]
    return page_template("trainer.insight", "report.html").render(
        name="/".join(session.config.run.folder.resolve().parts[-2:]),
        nothing=NOTHING,
        last=records[-1] if records else None,
        total_steps=total_steps,
        diverged=records[-1].get(NONFINITE) if records else None,
        trained_on=len(session.split.train),
        held_out=len(session.split.validation),
        newest=newest,
        verdict=test and verdict(*test),
        is_good=test is not None and is_image_used(*test),
        curves=curves(records),
        samples=captioned_samples(session, records),
        facts=[(name, format_value(value)) for name, value in flatten(asdict(session.config)) if value is not None],
    )


def captioned_samples(session: Session, records: Sequence[LogLine]) -> list[CaptionedSample]:
    """Collect all captions of the samples that the newest captions are about."""
    by_step = {
        record["step"]: {each["row"]: each for each in record[CAPTIONS]} for record in records if CAPTIONS in record
    }
    if not by_step:
        return []
    newest = list(by_step.values())[-1]
    previews = previews_of(session, list(newest))
    samples = []
    for row, caption in newest.items():
        every = [step_caption(step, captions[row]) for step, captions in by_step.items() if row in captions]
        shown = [every[place] for place in evenly_spaced(len(every), SHOWN_STEPS)]
        about = {key: caption[key] for key in ("row", "id", "prompt", "reference")}
        samples.append(CaptionedSample(**about, preview=previews.get(row), captions=shown[::-1]))
    return samples


def step_caption(step: int, caption: Mapping[str, Any]) -> StepCaption:
    text, reference = caption["text"], (caption["reference"] or "").strip()
    return StepCaption(step, text, caption["is_whole"], is_reference=text == reference)


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced indices into a list of `count`, the first and the last included."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most))})


def previews_of(session: Session, rows: list[int]) -> dict[int, np.ndarray]:
    """Return each row's preview, by row; empty if no cache has a map to RGB."""
    numbers = sample_numbers(session.cache, rows)
    parts = parts_alike(session.loader.stream.sizes.of(numbers), max(1, len(rows)))
    shown = [each for part in parts for each in previews(session.cache, session.cache.read(numbers[part]))]
    return {row: picture for row, picture in zip(rows, shown, strict=True) if picture is not None}


@dataclass(frozen=True)
class Series:
    """One value of the log over the steps that have it."""

    step_S: np.ndarray
    value_S: np.ndarray


@dataclass(frozen=True)
class Curve:
    """A plot of the page."""

    title: str
    plot: Plot


def series(records: Sequence[LogLine], key: str) -> Series:
    pairs = [(record["step"], record[key]) for record in records if key in record]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return Series(np.array(steps, np.int64), np.array(values, np.float64))


def curves(records: Sequence[LogLine]) -> list[Curve]:
    """Draw every curve that the log has values for."""
    every: dict[str, tuple[str, Draw]] = {
        "loss": ("Loss per label token", losses),
        "val_accuracy": ("Share of held-out tokens predicted right", accuracies),
        "grad_norm": ("Gradient norm, before clipping", partial(steady, "grad_norm")),
        "param_norm": ("Norm of the projector's parameters", partial(steady, "param_norm")),
        "lr": ("Learning rate", partial(steady, "lr")),
        "samples_per_s": ("Samples per second", partial(steady, "samples_per_s")),
        GPU_USE: ("Share of time in which the GPU is busy", gpu_use),
    }
    return [
        Curve(title, plot(partial(figure, partial(draw, records))))
        for key, (title, draw) in every.items()
        if any(key in record for record in records)
    ]


def figure(draw: Callable[[Axes, Scheme], None], scheme: Scheme) -> Figure:
    drawn = Figure(figsize=INCHES)
    axes = drawn.subplots(gridspec_kw=MARGINS)  # matplotlib's automatic layout takes longer than everything else
    draw(axes, scheme)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    return drawn


def losses(records: Sequence[LogLine], axes: Axes, scheme: Scheme) -> None:
    draw_steps(axes, series(records, "loss"), scheme, "training")
    own, shuffled, error = (series(records, f"val_{key}") for key in ("loss", "loss_shuffled", "standard_error"))
    axes.plot(own.step_S, own.value_S, "o-", color=scheme.mark, markersize=4, label="own image")
    if len(shuffled.step_S):
        within = SIGNIFICANT * error.value_S if len(error.step_S) == len(shuffled.step_S) else None
        style: dict[str, Any] = {"color": scheme.text, "markersize": 4, "linewidth": 1, "capsize": 3}
        axes.errorbar(shuffled.step_S, shuffled.value_S, within, fmt="x--", label="another's, ± 2 errors", **style)


def accuracies(records: Sequence[LogLine], axes: Axes, scheme: Scheme) -> None:
    own, shuffled = (series(records, f"val_accuracy{which}") for which in ("", "_shuffled"))
    axes.plot(own.step_S, own.value_S, "o-", color=scheme.mark, markersize=4, label="own image")
    if len(shuffled.step_S):
        style: dict[str, Any] = {"color": scheme.text, "markersize": 4, "linewidth": 1}
        axes.plot(shuffled.step_S, shuffled.value_S, "x--", label="another's", **style)
    show_shares(axes)


def gpu_use(records: Sequence[LogLine], axes: Axes, scheme: Scheme) -> None:
    draw_steps(axes, series(records, GPU_USE), scheme, None)
    show_shares(axes)


def show_shares(axes: Axes) -> None:
    """Label an axis of shares in per cent, and widen it to LEAST_SPAN."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))
    low, high = axes.get_ylim()
    margin = max(0, LEAST_SPAN - (high - low)) / 2
    axes.set_ylim(max(0, low - margin), min(1, high + margin))


def steady(key: str, records: Sequence[LogLine], axes: Axes, scheme: Scheme) -> None:
    """Draw a value that every step has; its power of ten, if it is far from 1, is shown once, above the axis."""
    found = series(records, key)
    draw_steps(axes, found, scheme, None)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useMathText=True, useOffset=False)
    margin = LEAST_CHANGE * float(np.abs(found.value_S).max(initial=0)) / 2
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, (low + high) / 2 - margin), max(high, (low + high) / 2 + margin))


def draw_steps(axes: Axes, found: Series, scheme: Scheme, label: str | None) -> None:
    points = math.ceil(len(found.step_S) / POINTS)
    if points <= 1:
        axes.plot(found.step_S, found.value_S, color=scheme.fill, linewidth=1.2, label=label)
        return
    starts = np.arange(0, len(found.step_S), points)
    counts = np.diff([*starts, len(found.step_S)])
    step_S = found.step_S[starts + counts - 1]
    least_S, most_S = (reduce.reduceat(found.value_S, starts) for reduce in (np.minimum, np.maximum))
    axes.fill_between(step_S, least_S, most_S, color=scheme.fill, alpha=0.25, linewidth=0)
    axes.plot(step_S, np.add.reduceat(found.value_S, starts) / counts, color=scheme.fill, linewidth=1.2, label=label)
