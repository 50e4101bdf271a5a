"""The demo from end to end at toy size, and what it does when something is in its way."""

import subprocess
import sys

import pytest
from rich.console import Console

from cache_store import open_cache
from demo.__main__ import main
from demo.special_files import BROKEN, UNUSUAL
from demo.walk import StepFailedError, Walk
from trainer import load_projector
from trainer.run.folder import read_records


@pytest.mark.slow
def test_the_whole_demo_runs_at_toy_size(tmp_path, capfd):
    root = tmp_path / "run"
    sizes = ["--scenes", "120", "--text_steps", "2", "--train_steps", "2"]
    assert main(["--output", str(root), *sizes]) == 0
    said = capfd.readouterr().out
    seal = open_cache(root / "cache").seal
    assert (seal.spec.rows, seal.rejected) == (120 + len(BROKEN) + len(UNUSUAL), len(BROKEN))
    assert "data:image/png" in (root / "gallery.html").read_text(encoding="utf-8")
    validated = read_records(root / "train")[-1]
    assert load_projector(root / "projector").config.training.steps == 2
    for told in (
        *("$ python -m precompute build --config configs/demo.yaml", "$ python -m cache_store verify"),
        *("$ python -m trainer train --config configs/train_demo.yaml", "$ python -m trainer export"),
        *(f"special-{kind}" for kind in BROKEN),
        f"{validated['val_loss']:.3f} per label token",
        *("$ python -m trainer generate", ", held out of training\n", "reference"),
        "colour words",
        "images/s a worker, decoding and writing included",
        "encoder.model: nvidia/Cosmos-Predict2-2B-Video2World",
        "model.language_model: google/gemma-3-4b-it",
    ):
        assert told in said


def test_a_failing_command_stops_the_demo_with_its_exit_code(tmp_path):
    with pytest.raises(StepFailedError, match="cache_store verify") as failure:
        Walk(Console(quiet=True)).run("cache_store", "verify", str(tmp_path))
    assert failure.value.exit_code == 2


def test_few_scenes_and_others_folders_are_refused_untouched(tmp_path, capsys):
    command = [sys.executable, "-m", "demo", "--scenes", "3"]
    few = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (few.returncode, "scenes must be at least" in few.stderr) == (2, True)
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["--output", str(tmp_path), "--scenes", "100", "--text_steps", "1", "--train_steps", "1"]) == 2
    assert "was not made by the demo" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
