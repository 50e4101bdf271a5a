"""Data parallelism for a projector: each rank holds the model, gradients are summed once a step.

One all-reduce of one flat tensor carries gradients, loss and stop requests, so a signal to any rank stops all ranks
after the same step. If a rank fails, only that rank prints its error; the others end with one line that refers to it.
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
"""Longest wait in a collective, while another rank may compile, save or validate; then a rank is assumed to hang."""

MAIN_WORK_TIMEOUT = timedelta(hours=2)
"""Longest wait for rank 0, which verifies the cache, tokenises new text and captions held-out samples."""

POLL_S = 0.1
"""Seconds between two checks whether rank 0 is done; a signal is handled in between."""

ENDED = "a rank ended"
"""Key in the store that tells the ranks waiting for rank 0 that a rank ended."""

START_UP_TIMEOUT = timedelta(minutes=10)
"""Longest wait for all ranks to start; they may load libraries over a network."""

UNREPORTED_WAIT_S = 15.0
"""A longer wait for the other ranks is reported."""

SOURCE_LINE = re.compile(r"\[\S*/\S+:\d+\] ?")
"""A source line of a library, such as `[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]`."""

TORCHRUN = "torchrun sets what the ranks need; to train in one process, unset WORLD_SIZE"


class OtherRankError(EncodeOnceError):
    """Another rank ended, so this one ends too."""

    def __init__(self, exit_code: int = 1, detail: str = "") -> None:
        super().__init__(f"another rank ended: its message says why{detail and f' ({detail})'}")
        self.exit_code = exit_code


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
        raise OtherRankError(detail=first_sentence(line)) from error


def first_sentence(line: str) -> str:
    """Drop gloo's source line and advice: `Connection closed by peer [10.0.0.7]:7777` is left."""
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
        """Do the work on rank 0 while the others wait. If it fails, the others end with the same exit code.

        They poll the store until it is done, so that collectives can have a timeout shorter than this work.
        """
        done = f"rank 0 has done its work {next(self.main_work)}"
        try:
            if self.is_main:
                work()
        except (EncodeOnceError, OSError) as error:
            with suppress(EncodeOnceError):  # our own error is the one to show
                self._exit_code_of_main(done, error.exit_code if isinstance(error, EncodeOnceError) else 1)
            raise
        if exit_code := self._exit_code_of_main(done, 0):
            raise OtherRankError(exit_code)

    def _exit_code_of_main(self, done: str, own: int) -> int:
        """Wait until rank 0 has set `done`, then sum `own` over ranks: the others have 0, so the sum is rank 0's."""
        if self.store is not None:
            with collective():
                if self.is_main:
                    self.store.set(done, "")
                else:
                    wait_for_main(done, self.store)
        return int(self.sum(torch.tensor(own, device=self.device)))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            with collective():
                dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def broadcast(self, tensor: Tensor) -> None:
        """Give every rank rank 0's values, in place."""
        if self.size > 1:
            with collective():
                dist.broadcast(tensor, src=0)

    def broadcast_parameters(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            self.broadcast(parameter.data)

    def sum_gradients(self, parameters: Sequence[nn.Parameter], extras: Tensor) -> Tensor:
        """Sum the gradients over ranks, in place, and `extras` with them; return the summed extras."""
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
    """Wait until rank 0 has set `done`; raise OtherRankError if a rank ends before that."""
    for _ in range(round(MAIN_WORK_TIMEOUT.total_seconds() / POLL_S)):
        if store.check([done]):
            return
        if store.check([ENDED]):
            raise OtherRankError
        time.sleep(POLL_S)
    raise EncodeOnceError(f"rank 0 has not finished verifying, tokenising or captioning after {MAIN_WORK_TIMEOUT}")


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter of the projector takes part in every forward pass"
    return parameter.grad


@contextmanager
def join_world() -> Iterator[World]:
    """Join the process group that torchrun's environment describes; without one, this process is alone."""
    size = environment_number("WORLD_SIZE", 1, at_least=1)
    rank, local_rank = environment_number("RANK", 0), environment_number("LOCAL_RANK", 0)
    device = local_device(local_rank)
    if size == 1:
        yield World(rank=0, size=1, device=device)
        return
    if rank >= size:
        raise ConfigError(f"RANK is {rank}, but WORLD_SIZE is {size}; {TORCHRUN}")
    store = join_group(device)
    try:
        yield World(rank=rank, size=size, device=device, store=store)
    except BaseException:
        with suppress(RuntimeError):  # the rank that holds the store may have ended
            store.set(ENDED, "")
        raise
    finally:
        dist.destroy_process_group()


def join_group(device: torch.device) -> Store:
    """Join the process group; return the store that the ranks share."""
    address, port = os.environ.get("MASTER_ADDR"), environment_number("MASTER_PORT", 0)
    if not address or not port:
        raise ConfigError(f"WORLD_SIZE asks for several ranks, but MASTER_ADDR or MASTER_PORT is not set; {TORCHRUN}")
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
            f"the ranks did not meet at {where}: {reason}; start all {os.environ['WORLD_SIZE']} together, with the "
            "same MASTER_ADDR and MASTER_PORT"
        ) from error


def wait_for_ranks(where: str) -> tuple[Store, int, int]:
    """Wait for the other ranks; return the shared store, this rank and the number of ranks. Report a long wait.

    torch waits in a thread of its own, since it would block signals.
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
    while True:  # signals are handled between two polls
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
        gpus = torch.cuda.device_count()
        raise ConfigError(f"LOCAL_RANK is {local_rank}, but this host has {gpus} GPUs; start at most one rank per GPU")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
