"""Counts the bytes that a forward pass keeps for the backward pass, by phase, each storage once."""

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from trainer.model.phases import open_phases

IN_NO_PHASE = "rest of the step"

SELECTED = "selective checkpointing"
"""Products that are kept by it, not by autograd; of which phase is not known."""


@contextmanager
def saved_bytes(besides: Iterable[Tensor] = ()) -> Iterator[dict[str, int]]:
    """Count what is saved in the block; weights, named `besides`, lie in memory anyway."""
    known = {place(each) for each in besides}
    found: dict[str, int] = defaultdict(int)
    kept: list[Tensor] = []  # so that no storage's place is used again while the block runs

    def pack(tensor: Tensor) -> Tensor:
        phases = open_phases()
        count(tensor, phases[-1] if phases else IN_NO_PHASE)
        return tensor

    def count(tensor: Tensor, phase: str) -> None:
        if place(tensor) not in known:
            known.add(place(tensor))
            kept.append(tensor.detach())
            found[phase] += tensor.untyped_storage().nbytes()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
    for tensor in selected():
        count(tensor, SELECTED)


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def selected() -> list[Tensor]:
    """Find what torch's selective checkpointing holds, each in a wrapper of its own."""
    wrappers = (each for each in gc.get_objects() if type(each).__name__ == "_VersionWrapper")
    return [each.val for each in wrappers if isinstance(each.val, Tensor)]
