"""What a run's log says of it: the figures and the curve of its losses."""

import io
import statistics
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.run.observers import Metrics
from trainer.run.records import read_records

LAST_STEPS = 10
"""Their mean is the training loss that is shown: a single step's is noise."""

INCHES, DOTS_PER_INCH = (7.0, 3.2), 144


@dataclass(frozen=True)
class Figures:
    """Losses per label token, by step."""

    loss: dict[int, float]
    validation: dict[int, float]
    shuffled: dict[int, float]
    """With another sample's latents."""
    accuracy: dict[int, float]
    """Share of validation's label tokens that are the likeliest."""

    @property
    def last_loss(self) -> float:
        return statistics.fmean(list(self.loss.values())[-LAST_STEPS:])


def read_figures(run: Path, steps: int) -> Figures | None:
    """Read the log up to `steps`; None where the folder has none, or nothing of those steps."""
    records = [record for record in read_records(run) if record["step"] <= steps]
    figures = Figures(*(by_step(records, key) for key in ("loss", "val_loss", "val_loss_shuffled", "val_accuracy")))
    return figures if figures.loss else None


def by_step(records: list[Metrics], key: str) -> dict[int, float]:
    return {int(record["step"]): record[key] for record in records if key in record}


def draw_curve(figures: Figures) -> bytes:
    """Draw the losses as a PNG; equal figures give equal bytes."""
    figure = Figure(INCHES, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss per label token")
    axes.plot(*by_axis(figures.loss), color="#6a9bd8", linewidth=1, label="training")
    for name, values, marker in (("validation", figures.validation, "o"), ("another's image", figures.shuffled, "x")):
        if values:
            axes.plot(*by_axis(values), marker, color="#b3432b", label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return stream.getvalue()


def by_axis(values: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())
