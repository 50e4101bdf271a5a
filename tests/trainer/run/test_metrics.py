import json
from pathlib import Path

import pytest

from trainer.run.metrics import MetricsLog


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_steps(folder: Path, completed: int, last: int) -> None:
    log = MetricsLog(folder, completed)
    for step in range(completed + 1, last + 1):
        log.write({"step": step, "loss": 1.5})
    log.close()


def test_log_and_tensorboard_hold_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(tmp_path, 0, 7)
    write_steps(tmp_path, 4, 6)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(step, 1.5) for step in range(1, 7)]


NO_RECORDS = {
    "cut short": b'{"step": 4, "lo',
    "a list": b"[1]",
    "a number": b"7",
    "without a step": b'{"loss": 1}',
    "a step in words": b'{"step": "2"}',
    "not UTF-8": b'{"step": 2, "x": "\xff"}',
    "zeros": b"\0\0\0",
}


@pytest.mark.parametrize("line", NO_RECORDS.values(), ids=NO_RECORDS)
def test_a_line_that_is_no_record_is_dropped_and_the_others_stay(tmp_path, line):
    write_steps(tmp_path, 0, 3)
    path = tmp_path / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, line, *others, line]))
    write_steps(tmp_path, 3, 4)
    assert steps(tmp_path) == [1, 2, 3, 4]
