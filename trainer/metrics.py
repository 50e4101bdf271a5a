"""What a run tells of itself: one JSON line a step, and the same in TensorBoard."""

import json
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from cache_store.publish import write_file

Metrics = dict[str, float | int]


class MetricsLog:
    """`metrics.jsonl` and TensorBoard events under `folder`, continued after `completed_steps`."""

    def __init__(self, folder: Path, completed_steps: int) -> None:
        self.path = folder / "metrics.jsonl"
        drop_later_steps(self.path, completed_steps)
        self._lines = self.path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=completed_steps + 1)

    def write(self, metrics: Metrics) -> None:
        self._lines.write(json.dumps(metrics) + "\n")
        self._lines.flush()
        for name, value in metrics.items():
            if name != "step":
                self._events.add_scalar(name, value, int(metrics["step"]))

    def close(self) -> None:
        self._lines.close()
        self._events.close()


def drop_later_steps(path: Path, completed_steps: int) -> None:
    """Forget what ran beyond the checkpoint, and a line that a kill cut short: no step may appear twice."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if step_of(line) <= completed_steps]
    write_file(path, "".join(f"{line}\n" for line in kept).encode())


def step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except json.JSONDecodeError:
        return float("inf")
