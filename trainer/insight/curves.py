"""The curves of a run's page, drawn from its log."""

# Axes: S steps of the log.

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cache_store.gallery.page import DARK, LIGHT, Plot, Scheme, svg_uri
from cache_store.gallery.pictures import data_uri
from trainer.run.validation import SIGNIFICANT

POINTS = 300
"""Points of a curve; of more steps, each point is the mean of some and the band their range."""

LEAST_SPAN = 0.2
"""Of an axis of shares: a single point stands in the middle of it."""

LEAST_CHANGE = 0.01
"""Span of an axis relative to its values: less has ticks of many digits, which tell nothing."""

INCHES = (5.2, 2.6)
MARGINS = {"left": 0.14, "right": 0.98, "bottom": 0.18, "top": 0.89}

Record = Mapping[str, Any]
"""A line of the log."""

Draw = Callable[[Sequence[Record], Axes, Scheme], None]


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


def series(records: Sequence[Record], key: str) -> Series:
    pairs = [(record["step"], record[key]) for record in records if key in record]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return Series(np.array(steps, np.int64), np.array(values, np.float64))


def curves(records: Sequence[Record]) -> list[Curve]:
    """Draw every curve that the log has values for."""
    every: dict[str, tuple[str, Draw]] = {
        "loss": ("Loss per label token", losses),
        "val_accuracy": ("Tokens right, of held-out samples", accuracies),
        "grad_norm": ("Gradient norm, before clipping", partial(steady, "grad_norm")),
        "param_norm": ("Norm of the projector's parameters", partial(steady, "param_norm")),
        "lr": ("Learning rate", partial(steady, "lr")),
        "samples_per_s": ("Samples per second", partial(steady, "samples_per_s")),
    }
    return [
        Curve(title, drawn_once(partial(figure, partial(draw, records))))
        for key, (title, draw) in every.items()
        if any(key in record for record in records)
    ]


def drawn_once(draw: Callable[[Scheme], Figure]) -> Plot:
    """Draw for a light page, and put the dark one's colours in its place: drawing takes nearly all of a page's time."""
    light = svg_uri(draw, LIGHT)
    svg = base64.b64decode(light.partition(",")[2]).decode()
    for name, colour in vars(LIGHT).items():
        svg = svg.replace(colour, getattr(DARK, name))
    return Plot(light=light, dark=data_uri("image/svg+xml", svg.encode()))


def figure(draw: Callable[[Axes, Scheme], None], scheme: Scheme) -> Figure:
    made = Figure(figsize=INCHES)  # a layout of matplotlib's own takes longer than all else
    axes = made.subplots(gridspec_kw=MARGINS)
    draw(axes, scheme)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    return made


def losses(records: Sequence[Record], axes: Axes, scheme: Scheme) -> None:
    draw_steps(axes, series(records, "loss"), scheme, "training")
    own, shuffled, error = (series(records, f"val_{key}") for key in ("loss", "loss_shuffled", "standard_error"))
    axes.plot(own.step_S, own.value_S, "o-", color=scheme.mark, markersize=4, label="own image")
    if len(shuffled.step_S):
        within = SIGNIFICANT * error.value_S if len(error.step_S) == len(shuffled.step_S) else None
        style: dict[str, Any] = {"color": scheme.text, "markersize": 4, "linewidth": 1, "capsize": 3}
        axes.errorbar(shuffled.step_S, shuffled.value_S, within, fmt="x--", label="another's, ± 2 errors", **style)


def accuracies(records: Sequence[Record], axes: Axes, scheme: Scheme) -> None:
    own, shuffled = (series(records, f"val_accuracy{which}") for which in ("", "_shuffled"))
    axes.plot(own.step_S, own.value_S, "o-", color=scheme.mark, markersize=4, label="own image")
    if len(shuffled.step_S):
        style: dict[str, Any] = {"color": scheme.text, "markersize": 4, "linewidth": 1}
        axes.plot(shuffled.step_S, shuffled.value_S, "x--", label="another's", **style)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))
    low, high = axes.get_ylim()
    margin = max(0, LEAST_SPAN - (high - low)) / 2
    axes.set_ylim(max(0, low - margin), min(1, high + margin))


def steady(key: str, records: Sequence[Record], axes: Axes, scheme: Scheme) -> None:
    """Draw a value that every step has; its power of ten, where it is far from 1, stands once, above the axis."""
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
