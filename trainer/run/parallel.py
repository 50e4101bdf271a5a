"""Data parallelism for a projector: each rank holds the model, gradients are summed once a step.

    sum_gradients    once a step, one flat tensor of gradients, loss and stop requests: all stop after the same step
    sum, any         all ranks meet
    broadcast        all ranks get rank 0's values
    on_main          rank 0 works, the others wait
    say, warn        rank 0 alone; nobody waits

If a rank fails, only that rank prints its error; the others end with one line that refers to it.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.log import log_info, log_warning
from cache_store.storage.threads import complete, start_thread

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Longest wait in a collective, while another rank may compile, save or validate; then a rank is assumed to hang."""

MAIN_WORK_TIMEOUT = timedelta(hours=2)
"""Longest wait for rank 0, which verifies the cache, tokenises new text and captions held-out samples."""

POLL_S = 0.1
"""Seconds between two checks whether rank 0 is done; a signal is handled in between."""

ENDED = "a rank ended"
"""Key in the store, for ranks that wait for rank 0."""

START_UP_TIMEOUT = timedelta(minutes=10)
"""Longest wait for all ranks to start; they may load libraries over a network."""

UNREPORTED_WAIT_S = 15.0
"""A longer wait for the other ranks is reported."""

LAUNCHED = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
"""What torchrun sets, and what holds without it."""


class OtherRankError(EncodeOnceError):
    """Another rank ended, so this one ends too."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(f"another rank ended: its message says why{detail and f' ({detail})'}")


@contextmanager
def collective() -> Iterator[None]:
    """Wrap an operation of all ranks; raise EncodeOnceError if one of them is gone or hangs."""
    try:
        yield
    except RuntimeError as error:  # raised by gloo itself; torch's DistError is a subclass
        line = str(error).partition("\n")[0]
        if "imed out" in line:
            raise EncodeOnceError(
                f"another rank has not answered for {COLLECTIVE_TIMEOUT}: it hangs, or its machine does"
            ) from error
        raise OtherRankError(line) from error


@dataclass(frozen=True)
class World:
    """One rank of a training run: this process and how it reaches the others."""

    rank: int
    size: int
    device: torch.device
    store: Store | None = None
    """Where ranks leave messages for each other; None for a single rank."""
    main_work: Iterator[int] = field(default_factory=count)
    """Numbers of the calls of `on_main`, the same on every rank."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, message: str) -> None:
        if self.is_main:
            print(message, flush=True)

    def warn(self, message: str) -> None:
        if self.is_main:
            log_warning(message)

    def on_main(self, work: Callable[[], object]) -> None:
        """Do the work on rank 0 while the others poll the store, for longer than a collective may take.

        If it fails, they end too.
        """
        done = f"rank 0 has done its work {next(self.main_work)}"
        if self.is_main:
            work()
        if self.store is None:
            return
        with collective():
            if self.is_main:
                self.store.set(done, "")
                return
            for _ in range(round(MAIN_WORK_TIMEOUT.total_seconds() / POLL_S)):
                if self.store.check([done]):
                    return
                if self.store.check([ENDED]):
                    raise OtherRankError
                time.sleep(POLL_S)
        raise EncodeOnceError(f"rank 0 has not finished verifying, tokenising or captioning after {MAIN_WORK_TIMEOUT}")

    def sum(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            with collective():
                dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def broadcast(self, tensor: Tensor) -> None:
        if self.size > 1:
            with collective():
                dist.broadcast(tensor, src=0)

    def broadcast_parameters(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            self.broadcast(parameter.data)

    def sum_gradients(self, parameters: Sequence[nn.Parameter], extras: Tensor) -> Tensor:
        """Sum gradients and `extras` over ranks, the gradients in place; return the extras."""
        if self.size == 1:
            return extras
        gradients = [gradient_of(parameter) for parameter in parameters]
        flat = self.sum(torch.cat([parameters_to_vector(gradients), extras]))
        vector_to_parameters(flat[: -len(extras)], gradients)
        return flat[-len(extras) :]


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter of the projector takes part in every forward pass"
    return parameter.grad


@contextmanager
def join_world() -> Iterator[World]:
    """Join the process group that torchrun's environment describes; without one, this process is alone."""
    size, rank, local_rank = (int(os.environ.get(name, default)) for name, default in LAUNCHED.items())
    device = local_device(local_rank)
    if size == 1:
        yield World(rank=0, size=1, device=device)
        return
    store = join_group(size, device)
    try:
        yield World(rank=rank, size=size, device=device, store=store)
    except BaseException:
        with suppress(RuntimeError):  # the rank that holds the store may have ended
            store.set(ENDED, "")
        raise
    finally:
        dist.destroy_process_group()


def join_group(size: int, device: torch.device) -> Store:
    """Join the process group, and report a long wait; return the store that the ranks share."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    met = Future[tuple[Store, int, int]]()
    try:
        # not in this thread, where torch would block signals
        start_thread(lambda: complete(met, lambda: next(rendezvous("env://", timeout=START_UP_TIMEOUT))))
        try:
            met.exception(UNREPORTED_WAIT_S)
        except TimeoutError:
            log_info(f"rank {os.environ['RANK']} waits at {where} for the other ranks")
        store, rank, size = met.result()
        backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        options: dict[str, Any] = {"rank": rank, "world_size": size, "store": store, "device_id": device_id}
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **options)
        return PrefixStore("encode-once", store)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise EncodeOnceError(
            f"the ranks did not meet at {where}: {reason}; start all {size} together, with the same MASTER_ADDR and "
            "MASTER_PORT"
        ) from error


def local_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        raise ConfigError(f"LOCAL_RANK is {local_rank}, but this host has {gpus} GPUs; start at most one rank per GPU")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
