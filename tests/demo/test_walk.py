"""The demo from end to end at toy size, and what it does when something is in its way."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

from cache_store import open_cache
from cache_store.errors import ConfigError
from demo.config import DemoConfig
from demo.inputs import MARKER, prepare_folder
from demo.special_files import BROKEN, UNUSUAL
from demo.walk import StepFailedError, Walk


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "demo", *arguments], capture_output=True, text=True, check=False)


def test_the_whole_demo_runs_at_toy_size(tmp_path):
    root = tmp_path / "run"
    ended = run_demo("--output", str(root), "--scenes", "120", "--text_steps", "2", "--train_steps", "2")
    assert ended.returncode == 0, ended.stderr
    cache = open_cache(root / "cache")
    assert cache.seal.planned == 120 + len(BROKEN) + len(UNUSUAL)
    assert cache.seal.rejected == len(BROKEN)
    for typed in (
        "$ python -m precompute build --config configs/demo.yaml",
        "$ python -m cache_store verify",
        "$ python -m cache_store gallery",
        "$ python -m trainer train --config configs/train_demo.yaml",
        "$ python -m trainer eval --config configs/train_demo.yaml",
    ):
        assert typed in ended.stdout
    for kind in BROKEN:
        assert f"special-{kind}" in ended.stdout
    assert "data:image/png" in (root / "gallery.html").read_text(encoding="utf-8")
    losses = json.loads((root / "eval.json").read_text(encoding="utf-8"))
    assert f"{losses['own']:.3f} per label token" in ended.stdout
    assert "colour words" in ended.stdout
    assert "images/s a worker, decoding and writing included" in ended.stdout
    assert "encoder.model: nvidia/Cosmos-Predict2-2B-Video2World" in ended.stdout
    assert "model.language_model: google/gemma-3-4b-it" in ended.stdout


def test_a_failing_command_stops_the_demo_with_its_exit_code(tmp_path):
    with pytest.raises(StepFailedError, match="cache_store verify") as failure:
        Walk(Console(quiet=True)).run("cache_store", "verify", str(tmp_path))
    assert failure.value.exit_code == 2


def test_a_folder_that_the_demo_did_not_make_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    ended = run_demo("--output", str(tmp_path))
    assert ended.returncode == 2
    assert "was not made by the demo" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_previous_demos_folder_is_replaced(tmp_path):
    root = tmp_path / "run"
    assert not prepare_folder(root)
    (root / "old").touch()
    assert prepare_folder(root)
    assert [file.name for file in root.iterdir()] == [MARKER]


def test_help_teaches():
    ended = run_demo("--help")
    assert ended.returncode == 0
    for piece in ("--scenes", "broken or unusual", "examples:", "cache_store info"):
        assert piece in " ".join(ended.stdout.split())


def test_too_few_scenes_are_refused():
    with pytest.raises(ConfigError, match="scenes must be at least"):
        DemoConfig(scenes=3)


def test_in_its_own_folder_the_demo_adds_nothing_to_the_yaml_files():
    config = DemoConfig()
    assert config.build_options == ["--config", "configs/demo.yaml"]
    assert config.train_options == ["--config", "configs/train_demo.yaml"]
    resolved = config.train_config()
    assert resolved.cache == str(config.cache)
    assert resolved.model.language_model == str(config.language_model)
    assert resolved.run.output == str(config.train_output)
