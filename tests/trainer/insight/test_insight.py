"""Problems of a run are reported when they begin, the run is shown from outside, its steps profiled and compared."""

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

import trainer.train as training
from cache_store.errors import ConfigError
from cache_store.storage.claim import claim_folder
from tests.named import assert_names
from tests.nvml import stand_in
from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import ALONE, metrics, train_alone, watched
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.insight.compare import Turn, broken_limits, compare_turns
from trainer.insight.health import PLATEAU_STEPS, WINDOW, Watch
from trainer.insight.monitor import monitor, rows
from trainer.insight.profile import TOP, advice, profile
from trainer.run.folder import CONFIG_FILE, METRICS_FILE

WELL = {"samples_per_s": 20.0, "data_wait_share": 0.01, "peak_memory_bytes": 10}


def alerts(*steps: dict[str, float], memory: int | None = None) -> list[tuple[int, str]]:
    """Return the step and the first word of each alert."""
    watch = Watch(memory)
    return [(number, alert.split(" ")[0]) for number, step in enumerate(steps, 1) for alert in watch({**WELL, **step})]


def test_a_run_without_problems_has_no_alerts():
    steps = [{"loss": 5 * 0.99**step + 0.2 * (step % 3)} for step in range(2 * PLATEAU_STEPS // 2)]
    assert alerts(*steps) == []
    noise = np.random.default_rng(1).normal(1, 0.1, 1_000)
    noisy = [{"loss": (2 + 3 * 0.999**step) * each} for step, each in enumerate(noise)]
    assert "loss" not in dict(alerts(*noisy)).values()


def test_a_problem_is_reported_again_after_a_normal_window_and_a_skipped_step_is_none():
    skipped = {"loss": math.nan, "grad_norm": math.inf}
    assert alerts(*[{"loss": 3.0, "grad_norm": 1.0}] * WINDOW, skipped, {"loss": 9.0}) == [(WINDOW + 2, "loss")]
    spikes = [{"loss": 30.0 if step in (60, 62, 300, 700) else 3.0 - step / 1_000} for step in range(800)]
    assert alerts(*spikes) == [(61, "loss"), (301, "loss"), (701, "loss")]


def test_each_problem_is_reported_once_at_its_first_step():
    falling = [{"loss": 4 - step / 100} for step in range(WINDOW)]
    for early in (1, 2, 9, 11):
        assert alerts(*falling[:early], {"loss": 9.0}) == [(early + 1, "loss")]
    assert alerts(*[{"grad_norm": 1.0}] * 20, *[{"grad_norm": 1e6}] * 100) == [(21, "gradient")]
    assert alerts(*[{"loss": 2.0}] * (PLATEAU_STEPS + 9)) == [(PLATEAU_STEPS, "plateau:")]
    slow = [{**step, "samples_per_s": 10.0} for step in falling]
    assert alerts(*falling, *slow) == [(WINDOW + WINDOW // 2 + 1, "throughput")]
    assert alerts(*[{"data_wait_share": 0.06}] * (WINDOW + 9)) == [(WINDOW, "steps")]
    assert alerts(*[{"gpu_use": 0.5}] * (WINDOW + 9)) == [(WINDOW, "the")]
    assert alerts({"peak_memory_bytes": 95}, {"peak_memory_bytes": 96}, {"peak_memory_bytes": 97}, memory=100) == [
        (2, "memory:")
    ]


def test_a_run_shows_how_busy_its_gpu_is_in_log_and_monitor(configured: MakeConfig, monkeypatch):
    nvml, config = stand_in(monkeypatch), configured(max_steps=3)
    monkeypatch.setattr(training, "gpu_uuid", lambda _: "one")
    train_alone(config, watched(config, lambda read, _: nvml.wait_for_a_reading() if read > 1 else None))
    assert set(metrics(config.run.folder, "gpu_use").values()) == {0.5}
    assert ("GPU use", "50%") in rows(monitor(config.run.folder, once=True))


def make_run(folder: Path, steps: int, **last: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text("run: {max_steps: 8}\n")
    lines = [{"step": step, "loss": 4 / step, "samples_per_s": 20.0, "position": 8 * step} for step in range(1, steps)]
    lines.append({"step": steps, **last})
    (folder / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_is_shown_until_it_ends(tmp_path):
    make_run(tmp_path, 3, alerts=["plateau: found"])
    held = claim_folder(tmp_path)
    held.__enter__()

    def live_on(_: float) -> None:
        make_run(tmp_path, 8)
        held.__exit__(None, None, None)

    terminal = Console(file=(shown := io.StringIO()), width=100, force_terminal=True)
    seen = monitor(tmp_path, terminal, live_on)
    assert (len(seen.records), seen.state) == (8, "stopped; rerun to go on")
    assert_names(shown.getvalue(), "running plateau: found █▁")
    assert all(step in shown.getvalue() for step in ("3 of 8", "8 of 8"))


def test_a_run_of_epochs_has_a_length(tmp_path):
    make_run(tmp_path, 3, position=24, epoch=0.8, samples_per_s=400.0)
    (tmp_path / CONFIG_FILE).write_text("run: {epochs: 2.0, max_steps: null}\ndata: {batch_size: 8}\n")
    shown = dict(rows(monitor(tmp_path, once=True)))
    assert shown["step"].startswith("3 of 8, ")
    assert "left" in shown


def test_the_end_of_a_run_is_shown_and_another_folder_refused(tmp_path):
    make_run(tmp_path / "run", 3, nonfinite={"loss": "nan"})
    assert monitor(tmp_path / "run").state == "diverged"
    (tmp_path / "run" / "projector.safetensors").touch()
    assert monitor(tmp_path / "run").state == "done"
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=str(place)):
            monitor(place)


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
