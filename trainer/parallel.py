"""Data parallelism, as far as a projector needs it: each rank holds the model, gradients are summed once a step.

The gradients travel in one flat tensor together with the loss and the wish to stop, so that every rank knows all
three from one all-reduce, and a signal to any of them stops all of them after the same step.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

TIMEOUT = timedelta(hours=2)
"""Rank 0 tokenises a new data set while the others wait."""


@dataclass(frozen=True)
class World:
    """This process among those that train together."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, message: str) -> None:
        if self.is_main:
            print(message, flush=True)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def share(self, module: nn.Module) -> None:
        """Give every rank rank 0's parameters."""
        if self.size > 1:
            for parameter in module.parameters():
                dist.broadcast(parameter.data, src=0)

    def sum_gradients(self, parameters: Sequence[nn.Parameter], extras: Tensor) -> Tensor:
        """Sum the gradients over ranks, in place, and `extras` with them; returns the summed extras."""
        if self.size == 1:
            return extras
        gradients = [gradient_of(parameter) for parameter in parameters]
        flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients] + [extras]))
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
        return flat[start:]


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter of the projector takes part in every forward pass"
    return parameter.grad


@contextmanager
def join_world() -> Iterator[World]:
    """The process group that torchrun's environment describes, or this process alone."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = local_device(int(os.environ.get("LOCAL_RANK", 0)))
    if size == 1:
        yield World(rank=0, size=1, device=device)
        return
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield World(rank=rank, size=size, device=device)
    finally:
        dist.destroy_process_group()


def local_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
