"""Passes over an endless sequence of batches, which DataLoader workers share and a cursor resumes.

A pass has a number of positions, and the next pass continues where it ended. DataLoader workers are copies of the
stream, made for each pass or kept between passes, and must know where the next pass begins. So that position is in
memory that all workers share; it advances when the last worker has ended the pass.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import closing, nullcontext
from fractions import Fraction
from mmap import mmap
from typing import Any

import torch
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info

from cache_store.errors import ConfigError
from cache_store.messages import differences_between, refuse
from trainer.data.order import RankShare
from trainer.data.prefetch import WindowReader

MAX_WORKERS = 1_024
"""Most workers of one DataLoader; each keeps the bounds of its next pass in a column of its own."""

NEVER = 2**62
"""End position of a pass that never ends."""


class BatchStream(IterableDataset[dict[str, Any]]):
    """Batches by their number, given out in passes."""

    def __init__(self, share: RankShare, pass_positions: Fraction | int | None) -> None:
        """`share` is this rank's part of each global batch; `pass_positions` is a pass's length, None: endless."""
        super().__init__()
        self.share, self.batch_size, self.pass_positions = share, share.batch_size, pass_positions
        self._cursor, self._end = 0, self.pass_end(0)
        self._own_pass: tuple[int, int] | None = None
        # Forked workers share these pages; torch shares them with spawned ones as it pickles them.
        self._passes_2W = torch.frombuffer(mmap(-1, 16 * MAX_WORKERS), dtype=torch.int64).view(2, MAX_WORKERS)
        self._passes_2W[:] = torch.tensor([[self._cursor], [self._end]])

    @abstractmethod
    def batch(self, number: int, ahead: WindowReader | None = None) -> dict[str, Any]:
        """Read this rank's part of global batch `number`, counted from 0; any thread may call."""

    def read_ahead(self, end: int) -> WindowReader | None:
        """Return a reader that reads ahead of the batches before the position `end`; None to read each alone."""
        return None

    @abstractmethod
    def must_match(self) -> dict[str, Any]:
        """Return all that decides the batches; it must be equal where a state is loaded."""

    def pass_end(self, position: int) -> int:
        """Return the position at which the pass that contains `position` ends, with a whole batch."""
        if not self.pass_positions:
            return NEVER
        passes = position // self.pass_positions + 1
        return math.ceil(passes * self.pass_positions / self.batch_size) * self.batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        stride, offset = (worker.num_workers, worker.id) if worker else (1, 0)
        # The minimum of the ends moves past a pass only when every worker has ended it, however late some begin.
        # A resume exactly at a pass's end gives an empty pass; compare ends, because starts are equal.
        start, end = self._own_pass or self._passes_2W[:, :stride].amin(1).tolist()
        self._own_pass = None
        self._cursor, self._end = start, end
        number = start // self.batch_size + offset
        ahead = self.read_ahead(end)
        with closing(ahead) if ahead else nullcontext():
            while number * self.batch_size < end:
                # A worker's cursor is the position of its next batch minus its offset, so that it can resume alone.
                self._cursor = (number + stride - offset) * self.batch_size
                yield self.batch(number, ahead)
                number += stride
        following = torch.tensor([end, self.pass_end(end)])
        self._passes_2W[:, offset] = following
        if int(self._passes_2W[1, :stride].min()) > end:
            self._passes_2W[:] = following[:, None]  # all workers have ended: the next pass may have any number of them

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch last yielded, and all that must match."""
        return {"cursor": self._cursor, "end": self._end, **self.must_match()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at `state["cursor"]`; whatever else `state` has must match this stream."""
        now, saved = self.must_match(), {name: each for name, each in state.items() if name not in ("cursor", "end")}
        if saved and (differences := differences_between(saved, now)):
            remedy = "to resume from it, open the stream with the same settings; to start anew, load no state"
            refuse("the stream's state was saved by another stream", differences, [remedy], held="in the state")
        cursor = state.get("cursor")
        if not isinstance(cursor, int) or cursor < 0 or cursor % self.batch_size:
            raise ConfigError(f"cursor {cursor!r} is not a multiple of the global batch {self.batch_size}")
        # A cursor at the very end of a pass belongs to that pass, so the batch before it decides which pass it is.
        end = self.pass_end(max(cursor - self.batch_size, 0))
        if get_worker_info():  # the other workers are at other positions of the same pass
            self._own_pass = cursor, state.get("end", end)
        else:
            self._cursor, self._end = cursor, end
            self._passes_2W[:] = torch.tensor([[cursor], [end]])

    def set_epoch(self, epoch: int) -> None:
        """Refuse to be prepared by Accelerate, whose loaders call this, for several processes.

        They divide batches among the processes, as this stream has done already: most samples would never be seen.
        """
        if self.share.world_size > 1 or (distributed.is_initialized() and distributed.get_world_size() > 1):
            raise ConfigError(
                f"{type(self).__name__} was prepared by Accelerate, which would divide its batches among the processes "
                "again; give it rank= and world_size=, and take DataLoader(stream, batch_size=None) as it is, not "
                "prepared; with transformers' Trainer, return that from get_train_dataloader"
            )
