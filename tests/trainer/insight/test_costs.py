"""A profile accounts for a step's time; two configs are compared in turns, and each limit that B breaks is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.named import assert_names
from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import ALONE
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.insight.compare import Turn, broken_limits, compare_turns
from trainer.insight.profile import TOP, advice, profile


def test_the_parts_of_a_step_sum_to_its_time(configured: MakeConfig, tmp_path, capsys):
    config = configured(gradient_checkpointing="full", accumulate=2)
    found = profile(config, ALONE, 2, tmp_path / "out")
    assert sum(found.share(name) for name in found.times) == pytest.approx(1, rel=0.02)
    named = {(name, which) for name, times in found.times.items() for which, seconds in times.items() if seconds}
    for name in ("attention", "MLP", "norms"):
        assert {(name, which) for which in ("forward", "backward", "recomputed")} <= named
    assert {(name, "forward") for name in ("data wait", "projector", "embedding", "optimizer")} <= named
    assert ("logits and loss", "backward") in named
    assert len(found.operations) == TOP
    assert any(each.startswith("recomputed ") for each in advice(found))
    page, figures = ((tmp_path / "out" / name).read_text() for name in ("profile.md", "profile.json"))
    assert page in capsys.readouterr().out
    assert all("attention" in each and "aten::mm" in each for each in (page, figures))
    (trace,) = (tmp_path / "out").glob("*.pt.trace.json")  # the pattern of TensorBoard's profiler
    assert json.loads(trace.read_text())["traceEvents"]
    assert not config.run.folder.exists()


def turns(*seconds: float, loss: float = 1.0, peak: int = 100) -> list[Turn]:
    return [Turn([loss, loss], each, peak) for each in seconds]


def test_a_slowdown_of_both_sides_in_a_turn_changes_no_ratio():
    found = compare_turns(turns(2.0, 8.0, 4.0), turns(1.0, 4.0, 2.0, loss=1.25, peak=50), same_batches=True)
    assert (found.speedup, found.low, found.high) == (pytest.approx(2), pytest.approx(2), pytest.approx(2))
    assert "GPU" not in str(found)
    assert (found.memory_ratio, found.max_loss_delta, found.steps) == (0.5, 0.25, 6)
    noisy = compare_turns(turns(1.0, 1.0, 1.0), turns(1.0, 0.8, 1.2), same_batches=False)
    assert noisy.low < 1 < noisy.high
    assert broken_limits(found, min_speedup=2, max_memory_ratio=0.5, max_loss_delta=0.25) == []
    limits = {"min_speedup": 2.1, "max_memory_ratio": 0.4, "max_loss_delta": 0.2}
    assert [broken.split(" ")[0] for broken in broken_limits(found, **limits)] == ["speed-up", "memory", "the"]
    assert len(broken_limits(noisy, **limits)) == 3


def comparing(config: TrainConfig, home: Path, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Write both configs and the config that they are read over; return the command that compares them."""
    base = {
        "cache": config.cache,
        "model": {"language_model": config.model.language_model},
        "data": {"batch_size": 4, "max_text_tokens": 64, "text_dir": config.data.text_dir},
        "run": {"output": str(home / "run"), "precision": "fp32"},
    }
    paths = {name: str(home / f"{name}.yaml") for name in ("a", "b", "base")}
    for path, content in zip(paths.values(), (a, b, base), strict=True):
        Path(path).write_text(yaml.safe_dump(content))
    return ["compare", paths["a"], paths["b"], "--base", paths["base"], "--steps", "10"]


def test_two_configs_are_compared_on_the_same_batches(configured: MakeConfig, tmp_path, capsys):
    """Side A holds the language model whole on each rank, side B in parts: losses differ by rounding."""
    command = comparing(configured(), tmp_path, *({"run": {"parallel": name}} for name in ("ddp", "fsdp2")))
    options = ["--ranks", "2", "--max-loss-delta", "1e-4", "--min-speedup", "1000"]
    assert main([*command, *options]) == 1
    shown, announced = capsys.readouterr()
    *_, broken, last = shown.splitlines()
    assert_names(broken, "--min-speedup 1000")
    record = json.loads(last)
    assert (record["ranks"], record["steps"], record["broken"]) == (2, 10, [broken])
    assert announced.count("samples: ") == 1, "both sides have the same"
    assert not (tmp_path / "run").exists()
    assert main([*command[:-1], "3"]) == 2
    assert main([*command, "--ranks", "3"]) == 2  # four samples a batch


@pytest.mark.slow
def test_another_warm_up_is_another_run_and_a_run_that_diverges_breaks(configured: MakeConfig, tmp_path, capsys):
    for code, b in ((0, {"warmup_steps": 12}), (1, {"lr": 1000.0, "weight_decay": 1000.0, "warmup_steps": 0})):
        sides = ({"optim": {"warmup_steps": 1}}, {"optim": b})
        assert main(comparing(configured(), tmp_path, *sides)) == code
        record = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert record["max_loss_delta"] > 0
        assert [count > 0 for count in record["nonfinite"]] == [False, code == 1]
        assert [each.partition(":")[0] for each in record["broken"]] == ["B"] * code
