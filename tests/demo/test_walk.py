"""The demo from end to end at toy size, and the commands of the guide to building, as typed, on its inputs."""

import re
import shlex
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from rich.console import Console

from cache_store import open_cache, open_joined
from cache_store.cli import main as cache_store
from demo.__main__ import main
from demo.config import DemoConfig
from demo.inputs import make_data, save_vae
from demo.special_files import BROKEN, UNUSUAL
from demo.walk import StepFailedError, Walk
from precompute.cli import main as precompute
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


GUIDE = Path(__file__).parents[2] / "docs/guide/building.md"
ELSEWHERE = ("s3://", "hf://")
"""Places that tests cannot reach."""
MORE = {"estimate": ["--seconds", "0.1"], "build": ["--run.max_reject_fraction", "0.1"]}
"""Options for few scenes, of which more are broken."""


def commands_of(page: str) -> list[list[str]]:
    """Return the commands of a page's blocks; in a block with prompts, other lines are output."""
    commands = list[list[str]]()
    for block in re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        commands += map(shlex.split, prompted or lines)
    return commands


@pytest.mark.slow
@pytest.mark.usefixtures("threads_as_in_a_child")
def test_the_commands_of_the_guide_to_building_run_in_their_order(tmp_path, monkeypatch, capsys):
    """The one without --extend is refused, as the page shows."""
    demo = DemoConfig(output=str(tmp_path / "demo-run"), scenes=200)
    save_vae(demo, make_data(demo))
    monkeypatch.chdir(tmp_path)
    refused, run = [], {"precompute": precompute, "cache-store": cache_store}
    for program, *words in commands_of(GUIDE.read_text()):
        if program == "printf":
            Path(words[-1]).write_text(words[0].replace("\\n", "\n"))
        elif program == "unzip":
            with zipfile.ZipFile(words[1]) as archive:
                archive.extractall("grow", [name for name in archive.namelist() if fnmatch(name, words[2])])
        elif not any(word.startswith(ELSEWHERE) for word in words):
            code = run[program]([*words, *MORE.get(words[0], [])])
            refused += [words] if code else []
            assert code in (0, 1), words
    assert len(refused) == 1
    assert "--extend" in capsys.readouterr().err
    assert len(open_cache("packed.cache")) == 200
    assert len(open_joined({"world": "scenes.cache", "small": "small.cache"})) == len(open_cache("scenes.cache"))
