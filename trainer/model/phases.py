"""Names of a step's parts, under which a profiler finds their operations; without a profiler they cost microseconds."""

from typing import Literal

from torch.profiler import record_function

PREFIX = "trainer: "

Phase = Literal[
    "data wait", "host to device", "forward", "projector", "embedding", "attention", "MLP", "norms", "decoder",
    "logits and loss", "reconstruction", "backward", "communication", "optimizer", "bookkeeping", "live encoder",
]  # fmt: skip


def phase(name: Phase) -> record_function:
    """Mark the operations of a block as this part's; an inner block's are its own."""
    return record_function(PREFIX + name)
