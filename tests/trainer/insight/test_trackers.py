"""Trackers get a run's figures besides its own log."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.runs import metrics, train_alone


def test_a_tracker_that_is_not_installed_is_named(configured, refusal, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refusal(2, configured(report_to=["tensorboard", "wandb"]), names="run.report_to wandb `pip install wandb`")
    assert list(tmp_path.iterdir()) == []


BLOCK, HEADER = 32_768, 7


def log_records(log: bytes) -> Iterator[bytes]:
    """Cut W&B's file, a LevelDB log after a header, into records; a block's head has crc, length and kind."""
    place, record = HEADER, b""
    while place + HEADER <= len(log):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        length, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        record += log[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.filterwarnings("default")
def test_wandb_holds_every_step_and_caption_of_a_resumed_run(configured, monkeypatch, capsys):
    """Reads the offline files as `wandb sync` does; skipped unless the extra is installed."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    options = {"report_to": ["wandb"], "sample_captions": 2, "save_every": 1, "schedule": "constant"}
    for steps in (2, 3):
        train_alone(configured(**options, max_steps=steps))
    folder = configured().run.folder
    named = re.findall(r"^wandb: offline; to upload it: wandb sync (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [*map(Path, named)] == sorted(folder.glob("wandb/offline-run-*"))
    logged: dict[int, dict[str, object]] = {}
    runs = set()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            record = Record.FromString(data)
            runs |= {record.run.run_id} - {""}
            items = {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in record.history.item}
            if "global_step" in items:
                logged.setdefault(items["global_step"], {}).update(items)
    assert len(runs) == 1
    for name in ("loss", "val_loss"):
        found = {step: items[name] for step, items in logged.items() if name in items}
        assert found == pytest.approx(metrics(folder, name), rel=1e-6)
    assert all("captions/_type" in logged[step] for step in metrics(folder, "captions"))
    assert len(list(folder.glob("wandb/offline-run-*/files/media/images/**/*.png"))) == 2 * len(
        metrics(folder, "captions")
    )
