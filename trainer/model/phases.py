"""Names for the parts of a step, under which a profiler shows their operations; otherwise they cost microseconds."""

import threading
from typing import Literal

from torch.profiler import record_function

PREFIX = "trainer: "

Phase = Literal[
    "data wait", "image decoding", "live encoder", "host to device", "forward", "projector", "embedding", "decoder",
    "attention", "MLP", "norms", "logits and loss", "reconstruction", "backward", "communication", "optimizer",
    "bookkeeping",
]  # fmt: skip

_open = threading.local()


class phase(record_function):  # noqa: N801 (a context manager is written like a function)
    """Marks a block's operations as part of this phase; an inner block has its own phase."""

    def __init__(self, name: Phase) -> None:
        super().__init__(PREFIX + name)
        self.phase = name

    def __enter__(self) -> "phase":
        open_phases().append(self.phase)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        open_phases().pop()


def open_phases() -> list[Phase]:
    """Return the phases that this thread is in, the innermost last."""
    if not hasattr(_open, "phases"):
        _open.phases = []
    phases: list[Phase] = _open.phases
    return phases
