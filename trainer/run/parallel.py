"""Data parallelism, as far as a projector needs it: each rank holds the model, gradients are summed once a step.

The gradients travel in one flat tensor together with the loss and the wish to stop, so that every rank knows all
three from one all-reduce, and a signal to any of them stops all of them after the same step. Whatever ends one rank
is said by that rank alone; the others end with one line that points to it.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.log import log_info, log_warning

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Longest wait of a collective, which may include compiling, saving and validating; then a rank is taken to hang."""

MAIN_WORK_TIMEOUT = timedelta(hours=2)
"""Longest wait for rank 0, which verifies the cache, tokenises a new data set, and captions held-out samples."""

POLL_S = 0.1
"""Time between two checks whether rank 0 is done; a signal ends the wait in between."""

ENDED = "a rank ended"
"""Key in the store that tells ranks waiting for rank 0 that a process ended."""

START_UP_TIMEOUT = timedelta(minutes=10)
"""Longest wait for all ranks to start; loading libraries over a network takes time."""

UNREPORTED_WAIT_S = 15.0
"""A longer wait for the other ranks is reported."""

SOURCE_LINE = re.compile(r"\[\S*/\S+:\d+\] ?")
"""Of a library, as `[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]`."""

TORCHRUN = "torchrun sets what the ranks need; to train in one process, unset WORLD_SIZE"


class OtherRankError(EncodeOnceError):
    """Another rank ended, and with it the work of this one."""

    def __init__(self, exit_code: int = 1, detail: str = "") -> None:
        super().__init__(f"another rank ended: its message says why{detail and f' ({detail})'}")
        self.exit_code = exit_code


@contextmanager
def collective() -> Iterator[None]:
    """Wrap what needs all ranks: it fails where one of them is gone."""
    try:
        yield
    except RuntimeError as error:  # gloo raises just that; torch's own DistError is one too
        line = str(error).partition("\n")[0]
        if "imed out" in line:
            raise EncodeOnceError(
                f"another rank has not answered for {COLLECTIVE_TIMEOUT}: it hangs, or its machine does"
            ) from error
        raise OtherRankError(detail=without_advice(line)) from error


def without_advice(line: str) -> str:
    """What happened, as `Connection closed by peer [10.0.0.7]:7777`, without gloo's source line and its advice."""
    return SOURCE_LINE.sub("", line).partition(". ")[0].rstrip(".")


@dataclass(frozen=True)
class World:
    """One rank of a training run: this process and how it reaches the others."""

    rank: int
    size: int
    device: torch.device
    store: Store | None = None
    """Where ranks leave messages for each other; None for a single rank."""
    main_work: Iterator[int] = field(default_factory=count)
    """Numbers the calls of `on_main`, in the same order on every rank."""

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
        """Do the work on rank 0 while the others wait; where it fails, they end with its exit code.

        They look into the store until it is done, so that collectives need not wait for as long as this may take.
        """
        done = f"work {next(self.main_work)} of rank 0 is done"
        try:
            if self.is_main:
                work()
        except (EncodeOnceError, OSError) as error:
            with suppress(EncodeOnceError):  # our own error is the one to show
                self._exit_code_of_main(done, error.exit_code if isinstance(error, EncodeOnceError) else 1)
            raise
        if exit_code := self._exit_code_of_main(done, 0):
            raise OtherRankError(exit_code)

    def _exit_code_of_main(self, done: str, mine: int) -> int:
        """Wait until rank 0 has set `done`, then sum `mine` over ranks: the others give 0, so the sum is rank 0's."""
        if self.store is not None:
            with collective():
                if self.is_main:
                    self.store.set(done, "")
                else:
                    wait_for_main(done, self.store)
        return int(self.sum(torch.tensor(mine, device=self.device)))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            with collective():
                dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set on any rank."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def give(self, tensor: Tensor) -> None:
        """Give every rank rank 0's values, in place."""
        if self.size > 1:
            with collective():
                dist.broadcast(tensor, src=0)

    def broadcast(self, module: nn.Module) -> None:
        """Give every rank rank 0's parameters."""
        for parameter in module.parameters():
            self.give(parameter.data)

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


def wait_for_main(done: str, store: Store) -> None:
    """Wait until rank 0 has set `done`; OtherRankError if a rank ends before that."""
    for _ in range(round(MAIN_WORK_TIMEOUT.total_seconds() / POLL_S)):
        if store.check([done]):
            return
        if store.check([ENDED]):
            raise OtherRankError
        time.sleep(POLL_S)
    raise EncodeOnceError(f"rank 0 is not done after {MAIN_WORK_TIMEOUT} verifying, tokenising or captioning")


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter of the projector takes part in every forward pass"
    return parameter.grad


@contextmanager
def join_world() -> Iterator[World]:
    """Join the process group that torchrun's environment describes; without it, this process trains alone."""
    size = environment_number("WORLD_SIZE", 1, at_least=1)
    rank, local_rank = environment_number("RANK", 0), environment_number("LOCAL_RANK", 0)
    device = local_device(local_rank)
    if size == 1:
        yield World(rank=0, size=1, device=device)
        return
    if rank >= size:
        raise ConfigError(f"RANK is {rank}, of WORLD_SIZE {size}; {TORCHRUN}")
    store = join_group(device)
    try:
        yield World(rank=rank, size=size, device=device, store=store)
    except BaseException:
        with suppress(RuntimeError):  # whoever holds the store may have ended
            store.set(ENDED, "")
        raise
    finally:
        dist.destroy_process_group()


def join_group(device: torch.device) -> Store:
    """Make the process group; returns the store that the ranks met in."""
    address, port = os.environ.get("MASTER_ADDR"), environment_number("MASTER_PORT", 0)
    if not address or not port:
        raise ConfigError(f"WORLD_SIZE asks for several ranks, MASTER_ADDR or MASTER_PORT is not set; {TORCHRUN}")
    where = f"{address}:{port}"
    try:
        store, rank, size = wait_for_ranks(where)
        if device.type == "cuda":
            dist.init_process_group(
                "nccl", timeout=COLLECTIVE_TIMEOUT, world_size=size, rank=rank, store=store, device_id=device
            )
        else:
            dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT, world_size=size, rank=rank, store=store)
        return PrefixStore("encode-once", store)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise EncodeOnceError(
            f"the ranks did not meet at {where}: {reason}; all {os.environ['WORLD_SIZE']} must be started together, "
            "with the same MASTER_ADDR and MASTER_PORT"
        ) from error


def wait_for_ranks(where: str) -> tuple[Store, int, int]:
    """Wait for the other ranks; return the store they share, the rank and their number. Report a long wait.

    In a thread of its own: torch would not let go of a signal for as long as it waits.
    """
    met: Future[tuple[Store, int, int]] = Future()

    def wait() -> None:
        try:
            met.set_result(next(rendezvous("env://", timeout=START_UP_TIMEOUT)))
        except (RuntimeError, ValueError) as error:
            met.set_exception(error)

    Thread(target=wait, daemon=True).start()
    with suppress(TimeoutError):
        return met.result(UNREPORTED_WAIT_S)
    log_info(f"rank {os.environ['RANK']} waits at {where} for the other ranks")
    while True:  # a signal that comes between two looks at it is heard at the next
        with suppress(TimeoutError):
            return met.result(POLL_S)


def environment_number(name: str, default: int, at_least: int = 0) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < at_least:
        raise ConfigError(f"{name} must be a whole number of at least {at_least}, got {text!r}; {TORCHRUN}")
    return int(text)


def local_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(f"LOCAL_RANK is {local_rank}, this host has {torch.cuda.device_count()} GPUs; start no more")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
