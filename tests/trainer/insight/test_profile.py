"""A profile accounts for all of a step's time once, under known names."""

import json

import pytest

from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import ALONE
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
