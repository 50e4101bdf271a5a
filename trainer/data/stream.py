"""Latents in training order, for a training loop of one's own.

The position is the count of samples consumed. Global batch k covers the positions [k·B, (k+1)·B) of the endless
concatenation of epochs, so it may straddle two, and is never short. Rank r of R takes the r-th contiguous part of
it; DataLoader worker w of W takes every W-th batch, which the DataLoader puts back in order.

A pass covers `epochs` epochs, and the next pass goes on where it ended: passes one after the other are one long pass
cut up. Where the next one begins has to be known to the workers, which are copies made anew for each pass or kept from
pass to pass; so it lies in memory that all of them share, and moves on when the last of them has ended.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from cache_store import Cache, JoinedCache, open_cache, open_joined
from cache_store.errors import ConfigError
from cache_store.format.normalization import drawn_normalization, normalize
from cache_store.refusal import differences_between, refuse
from trainer.config import MAX_EPOCHS, MAX_SHUFFLE_BLOCK
from trainer.data.order import Int64Array, SampleOrder, lanes_of
from trainer.data.posterior import sample_posterior
from trainer.data.views import View, Views, open_views
from trainer.data.windows import Samples, WindowReader
from trainer.model.config import WORLD

MAX_WORKERS = 1_024
"""Most workers of one DataLoader; each keeps the bounds of its next pass in a column of its own."""

NEVER = 2**62
"""The end of a pass that has none."""


@dataclass(frozen=True)
class RankShare:
    """The part of each global batch that a rank shows."""

    batch_size: int
    """Of the global batch."""
    rank: int
    world_size: int

    def of(self, positions: Int64Array) -> Int64Array:
        """Pick those that it holds, of positions in any number of batches."""
        samples = self.batch_size // self.world_size
        return np.extract(positions % self.batch_size // samples == self.rank, positions)


def batch_positions(batch: int, batch_size: int) -> Int64Array:
    return np.arange(batch * batch_size, (batch + 1) * batch_size)


def as_tensor(samples: np.ndarray) -> Tensor:
    """Share the array's memory; numpy's bfloat16 (ml_dtypes) is unknown to torch and goes by its bits."""
    if samples.dtype.name == "bfloat16":
        return torch.from_numpy(samples.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(samples)


Caches = Cache | JoinedCache | str | Path | Mapping[str, str | Path] | Sequence[View]
"""A cache, joined ones, or views: open, or their paths."""


def as_cache(cache: Caches) -> Cache | JoinedCache:
    if isinstance(cache, Cache | JoinedCache):
        return cache
    if isinstance(cache, str | Path):
        return open_cache(cache)
    return open_joined(cache) if isinstance(cache, Mapping) else open_views(cache)


class LatentStream(IterableDataset[dict[str, Any]]):
    """Batches of latents in the keyed order of samples; the same for any number of DataLoader workers.

    Yields `latents` [batch_size / world_size, *shape] in the stored dtype (of joined caches a tensor each, by name),
    `numbers` (sample numbers, for `cache.samples`), `positions` (of each sample, for `sample_posterior`) and `cursor`,
    the position after the batch. Of texts also `mask` [batch_size / world_size, tokens], bool, True where a token is no
    padding (of joined caches a tensor for each cache of texts, by name).
    `load_state_dict({"cursor": …})` resumes there: the next pass holds what was left of that one. A pass that is left
    before its end is not over: without workers the next one begins where it began; with workers, which read ahead, load
    the cursor of the last batch first.
    With workers, pass it to `DataLoader(stream, batch_size=None, num_workers=W)` and keep the cursor of the last
    batch, since `state_dict` of this object then stands still: the workers hold copies.
    A `shuffle_block` above 1 is a shuffle in blocks (`trainer/data/order.py`): so many neighbours are read as one,
    ahead of their batches, and held while they are shown. Without workers a thread reads; of workers there can be one.
    With `normalize`, latents are float32 as the encoder's diffusion models are trained on them; of posterior moments,
    one is drawn at each position, by the stream's seed, and normalised then.
    """

    def __init__(
        self,
        cache: Caches,
        batch_size: int,
        *,
        seed: int = 0,
        epochs: float | None = 1,
        rank: int = 0,
        world_size: int = 1,
        shuffle_block: int = 1,
        normalize: bool = False,
    ) -> None:
        """`cache`: open, or its path; a mapping of names to paths is joined (`cache_store.open_joined`).

        A list is of views: caches of one plan that show the same images otherwise. A sample shows them in turn.
        `batch_size` is the global batch; a pass's last batch runs over into the next epoch; None never ends.
        """
        super().__init__()
        if batch_size < 1 or world_size < 1 or batch_size % world_size or not 0 <= rank < world_size:
            raise ConfigError(f"batch_size {batch_size} must divide among ranks (rank {rank} of {world_size})")
        if epochs is not None and not 0 < epochs <= MAX_EPOCHS:
            raise ConfigError(
                f"epochs must be above 0 and at most {MAX_EPOCHS:,}, or None for a pass that never ends, got {epochs}"
            )
        if not (isinstance(shuffle_block, int) and 1 <= shuffle_block <= MAX_SHUFFLE_BLOCK):
            raise ConfigError(
                f"shuffle_block must be a whole number in [1, {MAX_SHUFFLE_BLOCK:,}], got {shuffle_block!r}"
            )
        self.cache = as_cache(cache)
        are_named = isinstance(cache, Sequence) and any(isinstance(each, Mapping) for each in cache)
        self.normalize = normalize
        self._is_alone = isinstance(self.cache, Cache) or (isinstance(cache, Sequence) and not are_named)
        self.batch_size, self.share = batch_size, RankShare(batch_size, rank, world_size)
        lanes = lanes_of(batch_size)
        self.order = SampleOrder(self.cache.identity, seed, len(self.cache), block=shuffle_block, lanes=lanes)
        # A decimal as it was written: a tenth of 40 samples is 4, and not a little more.
        self.pass_samples = None if epochs is None else Fraction(str(epochs)) * len(self.cache)
        self._cursor, self._end = 0, self.pass_end(0)
        self._own_pass: tuple[int, int] | None = None
        passes = torch.tensor([[self._cursor], [self._end]]).repeat(1, MAX_WORKERS)
        self._passes_2W = passes.share_memory_()  # type: ignore[no-untyped-call]

    def pass_end(self, position: int) -> int:
        """Find the end of the pass that holds `position`: the end of the batch that completes it."""
        if self.pass_samples is None:
            return NEVER
        passes = position // self.pass_samples + 1
        return math.ceil(passes * self.pass_samples / self.batch_size) * self.batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        stride, offset = (worker.num_workers, worker.id) if worker else (1, 0)
        # The least of all is past a pass only once every worker has ended it, however late the others begin.
        start, end = self._own_pass or self._passes_2W[:, :stride].amin(1).tolist()
        self._own_pass = None
        self._cursor, self._end = start, end
        batch = start // self.batch_size + offset
        with self._windows(stride, end) as windows:
            while batch * self.batch_size < end:
                # A worker's cursor is where its next batch lies, less its offset, so that it too can resume alone.
                self._cursor = (batch + stride - offset) * self.batch_size
                yield self.read_batch(batch, windows)
                batch += stride
        self._finish_pass(offset, stride, end)

    def _windows(self, workers: int, end: int) -> AbstractContextManager[WindowReader | None]:
        """What reads ahead in a pass up to `end`, of a shuffle in blocks."""
        if self.order.block == 1:
            return nullcontext()
        if workers > 1:
            raise ConfigError(f"shuffle_block: each of {workers} workers would read every block; take one, or none")
        return closing(WindowReader(self.order, self.share.of, lambda at: self._shown(self.order.at(at), at), end))

    def _finish_pass(self, worker: int, workers: int, end: int) -> None:
        following = torch.tensor([end, self.pass_end(end)])
        self._passes_2W[:, worker] = following
        if int(self._passes_2W[0, :workers].min()) == end:
            self._passes_2W[:] = following[:, None]  # the last of them: for any number of workers after these

    def read_batch(self, batch: int, windows: WindowReader | None = None) -> dict[str, Any]:
        """Read the batch that has `batch` batches before it, where it is stored or out of what was read ahead."""
        positions = self.share.of(batch_positions(batch, self.batch_size))
        numbers = self.order.at(positions)
        read = windows(positions) if windows else self._shown(numbers, positions)
        latents = {name: as_tensor(each) for name, each in read.items()}
        if self.normalize:
            latents = self._normalized(latents, positions)
        shown = {"numbers": torch.from_numpy(numbers), "positions": torch.from_numpy(positions)}
        cursor = (batch + 1) * self.batch_size
        shown |= self._mask(numbers)
        return {"latents": latents[WORLD] if self._is_alone else latents, **shown, "cursor": cursor}

    def _mask(self, numbers: Int64Array) -> dict[str, Any]:
        """Which tokens are no padding, where there are texts."""
        if isinstance(self.cache, Cache):
            has_mask = self.cache.spec.array.has_mask
            return {"mask": torch.from_numpy(self.cache.mask(numbers))} if has_mask else {}
        masks = {name: torch.from_numpy(each) for name, each in self.cache.mask(numbers).items()}
        return {"mask": masks[WORLD] if self._is_alone else masks} if masks else {}

    def _normalized(self, latents: dict[str, Tensor], positions: Int64Array) -> dict[str, Tensor]:
        """Draw where there are moments, as the trainer does, then normalise."""
        caches = [self.cache] if isinstance(self.cache, Cache) else self.cache.caches.values()
        arrays = [each.spec.array for each in caches]
        done = {}
        for tower, ((name, each), array) in enumerate(zip(latents.items(), arrays, strict=True)):
            if array.encoder.posterior == "moments":
                each = sample_posterior(each, self.order.seed, positions, tower)
            done[name] = normalize(each, drawn_normalization(array.encoder))
        return done

    def _shown(self, numbers: Int64Array, positions: Int64Array) -> Samples:
        if isinstance(self.cache, Cache):
            return {WORLD: self.cache.read(numbers)}
        if isinstance(self.cache, Views):
            return self.cache.show(numbers, self.order.views_at(positions, len(self.cache.views)))
        return self.cache.read(numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position; the batch last yielded counts as consumed."""
        return {"cursor": self._cursor, "end": self._end, **self._must_match()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at `state["cursor"]`; everything else in `state` must match this stream."""
        now = self._must_match()
        if differences := differences_between({name: state.get(name, mine) for name, mine in now.items()}, now):
            remedy = "to go on from it, open the stream as it was then; to start anew, load no state"
            refuse("the stream's state was saved by another stream", differences, [remedy], held="in the state")
        cursor = state.get("cursor")
        if not isinstance(cursor, int) or cursor < 0 or cursor % self.batch_size:
            raise ConfigError(f"cursor {cursor!r} is not a multiple of the global batch {self.batch_size}")
        # At the end of a pass nothing of it is left: the position before is the one that tells which pass it is.
        end = self.pass_end(max(cursor - self.batch_size, 0))
        if get_worker_info():  # whose neighbours stand elsewhere in the same pass
            self._own_pass = cursor, state.get("end", end)
        else:
            self._cursor, self._end = cursor, end
            self._passes_2W[:] = torch.tensor([[cursor], [end]])

    def _must_match(self) -> dict[str, Any]:
        order = self.order
        fields = {"cache": order.identity, "seed": order.seed, "batch_size": self.batch_size}
        return {**fields, "shuffle_block": order.block}
