"""A run is shown from outside until it ends, even if its folder disappears meanwhile."""

import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from cache_store.errors import ConfigError
from cache_store.log import utc_time
from cache_store.storage.claim import claim_folder
from tests.named import assert_names
from trainer.insight.monitor import monitor, rows
from trainer.run.folder import CONFIG_FILE, METRICS_FILE


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


def test_a_run_of_epochs_has_a_length_and_one_that_stands_still_says_so(tmp_path):
    make_run(tmp_path / "run", 3)
    (tmp_path / "run" / CONFIG_FILE).write_text("run: {epochs: 2.0, max_steps: null}\ndata: {batch_size: 8}\n")
    now = datetime.now(UTC)
    lines = [
        {"step": step, "position": 8 * step, "epoch": 8 * step / 30, "samples_per_s": 400.0, "time": utc_time(each)}
        for step, each in enumerate((now - timedelta(seconds=21), now - timedelta(seconds=20)), 1)
    ]
    (tmp_path / "run" / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with claim_folder(tmp_path / "run"):
        seen = monitor(tmp_path / "run", once=True)
    assert seen.state.startswith("running, but no step for 2")
    assert dict(rows(seen))["step"].startswith("2 of 8, ")
    assert "left" in dict(rows(seen))


def test_the_end_of_a_run_is_shown_and_another_folder_refused(tmp_path):
    make_run(tmp_path / "run", 3, nonfinite={"loss": "nan"})
    assert monitor(tmp_path / "run").state == "diverged"
    (tmp_path / "run" / "projector.safetensors").touch()
    assert monitor(tmp_path / "run").state == "done"
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=str(place)):
            monitor(place)
