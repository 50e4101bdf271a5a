"""Two configs are compared in turns, and what B does not reach is said and is the exit code."""

import json

import pytest
import yaml

from tests.trainer.conftest import MakeConfig
from trainer.cli import main
from trainer.insight.compare import Limits, Turn, compare_turns


def turns(*seconds: float, loss: float = 1.0, peak: int = 100) -> list[Turn]:
    return [Turn([loss, loss], each, peak) for each in seconds]


def test_a_ratio_is_that_of_turns_side_by_side_with_its_interval():
    """Whatever slows both sides in a turn changes nothing."""
    found = compare_turns(turns(2.0, 8.0, 4.0), turns(1.0, 4.0, 2.0, loss=1.25, peak=50), same_batches=True)
    assert (found.speedup, found.low, found.high) == (pytest.approx(2), pytest.approx(2), pytest.approx(2))
    assert (found.memory_ratio, found.max_loss_delta, found.steps) == (0.5, 0.25, 6)
    noisy = compare_turns(turns(1.0, 1.0, 1.0), turns(1.0, 0.8, 1.2), same_batches=False)
    assert noisy.low < 1 < noisy.high
    assert noisy.max_loss_delta is None
    assert Limits(min_speedup=2, max_memory_ratio=0.5, max_loss_delta=0.25).broken(found) == []
    limits = Limits(min_speedup=2.1, max_memory_ratio=0.4, max_loss_delta=0.2)
    assert [said.split(" ")[0] for said in limits.broken(found)] == ["speed-up", "memory", "the"]
    assert len(limits.broken(noisy)) == 3


def test_two_configs_are_compared_on_the_same_batches(configured: MakeConfig, tmp_path, capsys):
    config = configured()
    base = {"cache": config.cache, "model": {"language_model": config.model.language_model}}
    base |= {"data": {"batch_size": 4, "max_text_tokens": 64, "text_dir": config.data.text_dir}}
    base |= {"run": {"output": str(tmp_path / "run"), "precision": "fp32"}}
    files = {"base": base, "a": {}, "b": {"run": {"gradient_checkpointing": "full"}}}
    paths = {name: tmp_path / f"{name}.yaml" for name in files}
    for name, content in files.items():
        paths[name].write_text(yaml.safe_dump(content))
    command = ["compare", str(paths["a"]), str(paths["b"]), "--base", str(paths["base"]), "--steps", "10"]
    assert main([*command, "--max-loss-delta", "0", "--min-speedup", "1000"]) == 1
    *_, broken, record = capsys.readouterr().out.splitlines()
    assert "is below --min-speedup 1000" in broken
    assert json.loads(record)["max_loss_delta"] == 0
    assert not (tmp_path / "run").exists()
    assert main([*command[:-1], "3"]) == 2
    assert main([*command, "--ranks", "3"]) == 2  # four samples a batch


def test_two_ranks_of_each_side_share_the_batches(configured: MakeConfig, tmp_path, capsys):
    """The language model whole on each against parts of it: losses differ by rounding."""
    config = configured()
    base = {"cache": config.cache, "model": {"language_model": config.model.language_model}}
    base |= {"data": {"batch_size": 4, "max_text_tokens": 64, "text_dir": config.data.text_dir}}
    base |= {"run": {"output": str(tmp_path / "run"), "precision": "fp32"}}
    paths = {name: tmp_path / f"{name}.yaml" for name in ("base", "ddp", "fsdp2")}
    for name, path in paths.items():
        path.write_text(yaml.safe_dump(base if name == "base" else {"run": {"parallel": name}}))
    command = ["compare", str(paths["ddp"]), str(paths["fsdp2"]), "--base", str(paths["base"]), "--steps", "10"]
    assert main([*command, "--ranks", "2", "--max-loss-delta", "1e-4"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["ranks"], record["steps"]) == (2, 10)
