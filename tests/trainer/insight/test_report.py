"""The page of a run shows all of its steps, whatever stopped it, and loads nothing from elsewhere."""

import base64
import re

import numpy as np
import pytest
from cache_store.gallery.page import LIGHT
from matplotlib.figure import Figure

from tests.make_cache import caption, make_cache
from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import make_loop, metrics, open_alone, train_alone, train_until
from trainer.config import TrainConfig
from trainer.insight.report import (
    REPORT_FILE,
    Report,
    accuracies,
    captioned_samples,
    curves,
    evenly_spaced,
    steady,
    write_report,
)
from trainer.run.folder import checkpoints_of, read_records


@pytest.fixture(scope="module")
def reported(configured_here: MakeConfig) -> TrainConfig:
    return train_alone(configured_here("reported", sample_captions=2))


def test_the_page_shows_every_curve_and_caption_by_itself(reported):
    page = (reported.run.folder / REPORT_FILE).read_text()
    assert "default-src 'none'" in page
    plots = [base64.b64decode(data).decode() for data in re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", page)]
    assert len(plots) == 2 * page.count("<h3>") == 2 * 6
    for text in (page, *plots):
        links = re.findall(r"(?:href|src|srcset)=\"([^\"]*)\"", text) + re.findall(r"url\(([^)]*)\)", text)
        assert links
        assert all(link.startswith(("data:", "#")) for link in links)
    for captions in metrics(reported.run.folder, "captions").values():
        assert all(each["text"] in page and each["id"] in page for each in captions)
    assert f"{metrics(reported.run.folder, 'val_loss')[12]:.4f}" in page
    assert "no sign that the model uses the image" in page
    assert f"<h1>Training: {reported.run.folder.parent.name}/reported</h1>" in page


def test_a_page_is_written_at_each_validation_and_the_end(configured):
    session = open_alone(configured())
    folder, steps = session.config.run.folder, []

    class Counted(Report):
        def finish(self) -> None:
            steps.append((len(read_records(folder)), max(checkpoints_of(session.config.run).steps())))

    make_loop(session, None, Counted(session, 12)).run()
    assert steps == [(5, 5), (10, 10), (12, 12)]


def test_a_resumed_runs_page_is_the_whole_runs(configured_here, reported):
    """The run is stopped between validations and within one; nothing is shown twice."""
    config = configured_here("resumed", sample_captions=2)
    for stop in (8, 12):
        train_until(config, stop)
    train_alone(config)
    pages = [open_alone(each) for each in (config, reported)]
    resumed, whole = (
        [vars(each) for each in captioned_samples(page, read_records(page.config.run.folder))] for page in pages
    )
    for one, other in zip(resumed, whole, strict=True):
        assert np.array_equal(one.pop("preview"), other.pop("preview"))
        assert one == other
        assert [caption.step for caption in one["captions"]] == [12, 10, 5]
    assert [record["step"] for record in read_records(pages[0].config.run.folder)] == list(range(1, 13))


def test_untrusted_words_are_shown_and_never_run(configured, tmp_path):
    words = "<script>alert(1)</script>"
    latents = np.random.default_rng(0).standard_normal((30, 4, 2, 2), np.float32)
    cache = make_cache(tmp_path / "cache", latents, conversations=[caption(words)] * 30)
    config = train_alone(configured(cache=cache, sample_captions=1, max_steps=1))
    page = (config.run.folder / REPORT_FILE).read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page


def test_without_a_log_or_held_out_samples_there_is_still_a_page(configured):
    config = configured(val_fraction=0.0, max_steps=1, sample_captions=3)
    session = open_alone(config)
    write_report(session, 7)
    assert "of 7 steps" in (page := config.run.folder / REPORT_FILE).read_text()
    make_loop(session, None, Report(session, 1)).run()
    assert page.read_text().count("<h3>") == 5


def test_axes_are_wide_enough_for_one_point_or_a_steady_value():
    axes = Figure().add_subplot()
    accuracies([{"step": 3, "val_accuracy": 0.46}], axes, LIGHT)
    assert axes.get_ylim() == pytest.approx((0.36, 0.56), abs=0.02)
    axes = Figure().add_subplot()
    steady("param_norm", [{"step": step, "param_norm": 27.7 + step / 10_000} for step in range(9)], axes, LIGHT)
    axes.figure.draw_without_rendering()
    assert axes.yaxis.get_offset_text().get_text() == ""
    assert np.diff(axes.get_ylim()) > 0.27


def test_a_long_run_is_thinned_to_its_first_and_newest():
    assert evenly_spaced(1, 8) == [0]
    assert evenly_spaced(8, 8) == list(range(8))
    assert (evenly_spaced(1_000, 8)[0], evenly_spaced(1_000, 8)[-1], len(evenly_spaced(1_000, 8))) == (0, 999, 8)
    long = [{"step": step, "loss": 1 / step} for step in range(1, 100_001)]
    (curve,) = curves(long)
    assert len(curve.plot.light) < 100_000
