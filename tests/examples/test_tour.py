"""The notebook runs in a kernel, from its first cell to its last, at toy size."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "examples/tour.ipynb"
TOY = "SCENES, TEXT_STEPS, TRAIN_STEPS = 100, 1, 2"


@pytest.mark.slow
def test_the_tour_builds_looks_trains_and_answers(tmp_path):
    for name in ("configs", "demo"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "examples").mkdir()
    tour = nbformat.read(TOUR, as_version=4)
    (parameters,) = (cell for cell in tour.cells if "parameters" in cell.metadata.get("tags", []))
    parameters.source = TOY
    NotebookClient(tour, timeout=300, resources={"metadata": {"path": str(tmp_path / "examples")}}).execute()
    outputs = [output for cell in tour.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    for told in ("= 104 cached + 5 rejected", "sound (full)", "trained 2 steps", "prompt     Describe the scene."):
        assert told in printed
    shown = [output.get("data", {}) for output in outputs]
    assert sum("image/png" in each for each in shown) == 2, "losses, the new scene"
    assert [each for each in shown if "scenes.html" in "".join(each.get("text/html", ""))], "the gallery"
