"""A profile accounts for all of a step's time once, under known names."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.precompute.conftest import make_vae, run_build, write_source
from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import ALONE, command
from trainer.cli import main
from trainer.insight.profile import profile
from trainer.insight.profile_report import advice, facts_of


def test_the_parts_of_a_step_sum_to_its_time(configured: MakeConfig, tmp_path):
    config = configured(gradient_checkpointing="full", accumulate=2)
    found = profile(config, ALONE, 2, tmp_path / "out", live_encoder=False)
    assert sum(part.host_s for part in found.parts) == pytest.approx(found.step_s * found.steps, rel=0.02)
    named = {(part.phase, part.which) for part in found.parts}
    for name in ("attention", "MLP", "norms"):
        assert {(name, which) for which in ("forward", "backward", "recomputed")} <= named
    assert {(name, "forward") for name in ("data wait", "projector", "embedding", "optimizer")} <= named
    assert ("logits and loss", "backward") in named
    assert found.flops > 0
    assert found.memory["language model"] > found.memory["projector"] > 0
    assert any(each.startswith("recomputed ") for each in advice(found))
    pages = {name: (tmp_path / "out" / name).read_text() for name in ("profile.md", "profile.html", "profile.json")}
    assert all("attention" in page and "aten::mm" in page for page in pages.values())
    (trace,) = (tmp_path / "out").glob("*.pt.trace.json")  # the pattern of TensorBoard's profiler
    assert json.loads(trace.read_text())["traceEvents"]
    assert not config.run.folder.exists()
    costs = {
        share: dict(facts_of(replace(found, step_s=1 + share, unrecorded_s=1.0)))["a step"] for share in (0.2, -0.2)
    }
    assert costs[0.2] == "1 s; 1.2 s while recorded (+20%)"
    assert costs[-0.2] == "1 s; 0.8 s while recorded (the cost of recording is not measurable)"


def test_a_live_encoder_is_a_part_of_the_step(configured: MakeConfig, tmp_path):
    cache = run_build(tmp_path, write_source(tmp_path / "source", range(12)), make_vae(tmp_path))
    found = profile(configured(cache=cache), ALONE, 2, tmp_path / "out", live_encoder=True)
    assert {"image decoding", "live encoder"} <= {part.phase for part in found.parts}
    assert next(advice(found)).startswith("encoding live ")


def test_a_profile_with_the_encoder_leaves_the_one_without(configured: MakeConfig, monkeypatch):
    folders, config = list[Path](), configured()
    monkeypatch.setattr("trainer.insight.profile.profile", lambda *given, **_: folders.append(given[3]))
    for options in ([], ["--live-encoder"]):
        assert main([*command(config, "profile"), *options]) == 0
    assert folders == [Path(f"{config.run.folder}-profile"), Path(f"{config.run.folder}-profile-live")]
