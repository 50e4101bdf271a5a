"""Names for the parts of a step, under which a profiler shows their operations; otherwise they cost microseconds."""

from typing import Literal

from torch.profiler import record_function

PREFIX = "trainer: "

Phase = Literal[
    "data wait", "image decoding", "live encoder", "host to device", "forward", "projector", "embedding", "decoder",
    "attention", "MLP", "norms", "logits and loss", "reconstruction", "backward", "communication", "optimizer",
    "bookkeeping",
]  # fmt: skip


def phase(name: Phase) -> record_function:
    """Mark a block's operations as part of this phase; an inner block has its own phase."""
    return record_function(PREFIX + name)
