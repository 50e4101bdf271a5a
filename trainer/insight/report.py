"""The page of a run: is it learning? Made whole from the log on disk, so that a resumed run's page is the whole run's.

Ids and words are untrusted text: Jinja2 escapes every value that enters the page.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cache_store.gallery.page import page_template
from cache_store.program.config import format_value
from cache_store.refusal import flatten
from trainer.generate.rows import sample_numbers
from trainer.insight.captions import NOTHING
from trainer.insight.curves import Record, curves
from trainer.insight.previews import previews
from trainer.run.folder import write_changed
from trainer.run.observers import Observer, StepDone
from trainer.run.records import CAPTIONS, NONFINITE, read_records
from trainer.run.session import Session
from trainer.run.validation import is_image_used, verdict

REPORT_FILE = "report.html"

SHOWN_STEPS = 8
"""Captions of one sample: of more, evenly spaced ones, the first and the newest among them."""


@dataclass(frozen=True)
class Said:
    """A caption at one step."""

    step: int
    text: str
    is_whole: bool
    is_reference: bool
    """Whether it is the reference, word for word."""


@dataclass(frozen=True)
class CaptionedSample:
    """What was said of one sample, newest first."""

    row: int
    id: str
    prompt: str
    reference: str | None
    preview: np.ndarray | None
    said: Sequence[Said]


class Report(Observer):
    """Writes the page at each validation, at the end, and where a run diverges."""

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
    """Write the page, unless it is there already."""
    folder = session.config.run.folder
    write_changed(folder / REPORT_FILE, render(session, read_records(folder), total_steps).encode())


def render(session: Session, records: Sequence[Record], total_steps: int) -> str:
    """The page as one HTML text that refers to nothing outside itself."""
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


def captioned_samples(session: Session, records: Sequence[Record]) -> list[CaptionedSample]:
    """Collect what was said of each sample that the newest captions are of."""
    by_step = {
        record["step"]: {each["row"]: each for each in record[CAPTIONS]} for record in records if CAPTIONS in record
    }
    if not by_step:
        return []
    newest = list(by_step.values())[-1]
    previews = previews_of(session, list(newest))
    samples = []
    for row, caption in newest.items():
        said = [as_said(step, captions[row]) for step, captions in by_step.items() if row in captions]
        shown = [said[place] for place in evenly(len(said), SHOWN_STEPS)]
        about = {key: caption[key] for key in ("row", "id", "prompt", "reference")}
        samples.append(CaptionedSample(**about, preview=previews.get(row), said=shown[::-1]))
    return samples


def as_said(step: int, caption: dict[str, Any]) -> Said:
    return Said(step, caption["text"], caption["is_whole"], caption["text"] == (caption["reference"] or "").strip())


def evenly(count: int, most: int) -> list[int]:
    """Places of at most so many of a list, the first and the last among them."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most))})


def previews_of(session: Session, rows: list[int]) -> dict[int, np.ndarray]:
    """The latents of these rows as a cache's map to RGB shows them, where one has it."""
    shown = previews(session.cache, session.cache.read(sample_numbers(session.cache, rows)))
    return {row: picture for row, picture in zip(rows, shown, strict=True) if picture is not None}
