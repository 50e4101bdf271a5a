"""Latents in training order: for the trainer, and for your own training loop.

The position is the number of samples consumed. Global batch k covers the positions [k·B, (k+1)·B) of an endless
sequence of epochs, so a batch may span two epochs and is never short. Rank r of R takes the r-th contiguous part of
it; DataLoader worker w of W takes every W-th batch, which the DataLoader puts back in order.

A pass covers `epochs` epochs, and the next pass continues where it ended. DataLoader workers are copies of the stream,
made for each pass or kept between passes, and must know where the next pass begins. So that position is in memory that
all workers share; it advances when the last worker has ended the pass.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from fractions import Fraction
from mmap import mmap
from typing import Any, Protocol

import numpy as np
import torch
from numpy.random import Generator, Philox
from torch import Tensor, distributed
from torch.utils.data import IterableDataset, get_worker_info

from cache_store.cache.joined import JoinedCache
from cache_store.cache.reader import Cache, valid_numbers
from cache_store.errors import ConfigError
from cache_store.format.normalization import drawn_normalization, normalize
from cache_store.messages import differences_between, refuse
from trainer.config import MAX_EPOCHS
from trainer.data.dropout import caption_dropped, refuse_rate, with_nulls
from trainer.data.order import Int64Array, RankShare, batch_positions, make_order
from trainer.data.prefetch import Samples, WindowReader
from trainer.data.views import Caches, Views, are_named, has_moments, open_caches
from trainer.model.model_config import WORLD

MAX_WORKERS = 1_024
"""Most workers of one DataLoader; each keeps the bounds of its next pass in a column of its own."""

NEVER = 2**62
"""End position of a pass that never ends."""

# Axes: N samples, M moments: C means, then C log-variances, H W latent cells.


class LatentSource(Protocol):
    """Stands in for a cache, such as the encoders themselves."""

    def read(self, numbers: np.ndarray) -> Samples:
        """Read samples in the order of `numbers`, by the names of the caches; a cache alone is named `world`."""


class LatentStream(IterableDataset[dict[str, Any]]):
    """Batches of latents in the keyed order of samples; the same for any number of DataLoader workers.

    Yields `latents` [batch_size / world_size, *shape] in the stored dtype (for joined caches, a mapping of names to
    tensors), `numbers` (sample numbers, for `cache.samples`), `positions` (of each sample, for `sample_posterior`) and
    `cursor`, the position after the batch. Caches of texts add `mask` [batch_size / world_size, tokens], bool, False at
    padding (for joined caches, a mapping of names to masks).
    `load_state_dict({"cursor": …})` resumes there: the next pass holds what was left of that one. A pass that you leave
    before its end is not finished: without workers, the next pass begins where that one began; with workers, which read
    ahead, first load the cursor of the last batch.
    With workers, pass it to `DataLoader(stream, batch_size=None, num_workers=W)` and save the cursor of the last batch:
    the workers hold copies, so this object's `state_dict` does not advance. For a cache in an object store, add
    `multiprocessing_context="spawn"`.

    Args:
        cache: An open cache or its path. A mapping of names to paths is joined (`cache_store.open_joined`). A list
            holds views: caches of one plan that show the same images differently. Each sample shows them in turn.
        batch_size: Size of the global batch. A pass's last batch is filled from the next epoch.
        samples: Numbers of the samples to show, such as a training split; an epoch shows each once. Default: all.
        seed: Seed of the order, and of latents that are drawn.
        epochs: Length of a pass; None: it never ends.
        rank: The part of each global batch that this process reads, in [0, world_size).
        world_size: Number of parts; it divides `batch_size`.
        shuffle_block: Above 1, that many neighbours are read together, ahead of their batches, and held while they are
            shown (`trainer/data/order.py`). It allows at most one worker; threads read ahead.
        draw: Whether to draw a latent from posterior moments at each position, float32, by `sample_posterior`.
        normalize: Whether to give latents as the encoder's diffusion models are trained on them, float32; from moments,
            a latent is drawn first.
        caption_dropout: Share of positions at which the null prompt's sample and mask take the place of every text's;
            which ones is a pure function of (seed, position), `trainer.caption_dropped`.
        source: Gives samples in place of the cache, by the names of its caches.

    Raises ConfigError if there are no samples or options contradict each other, and IndexError for a sample number that
    the cache lacks.
    """

    def __init__(
        self,
        cache: Caches,
        batch_size: int,
        *,
        samples: np.ndarray | None = None,
        seed: int = 0,
        epochs: float | None = 1,
        rank: int = 0,
        world_size: int = 1,
        shuffle_block: int = 1,
        draw: bool = False,
        normalize: bool = False,
        caption_dropout: float = 0.0,
        source: LatentSource | None = None,
    ) -> None:
        super().__init__()
        self.batch_size, self.share = batch_size, RankShare(batch_size, rank, world_size)
        self.cache, self._are_named = open_caches(cache), are_named(cache)
        self.source: LatentSource = self.cache if source is None else source
        if isinstance(source, Cache) or not hasattr(self.source, "read"):
            raise ConfigError(
                "source must have a `read` that gives samples by the names of the caches, as that of "
                f"cache_store.open_joined({{'world': CACHE}}) does; got {source!r}"
            )
        if draw and not has_moments(self.cache):
            raise ConfigError(f"draw: {self.cache.first.store} holds no posterior moments to draw from")
        self.draw, self.normalize = draw or normalize, normalize
        refuse_rate(caption_dropout)
        self.caption_dropout = caption_dropout
        self._nulls = nulls_of(self.cache) if caption_dropout else None
        total = len(self.cache)
        self.samples = None if samples is None else valid_numbers(samples, total)
        count = total if self.samples is None else len(self.samples)
        if not count:
            where = f"{self.cache.first.store} holds none" if self.samples is None else "samples is empty"
            raise ConfigError(f"there are no samples to show: {where}")
        self.order = make_order(self.cache.identity, seed, count, batch_size, shuffle_block)
        self.pass_samples = None if epochs is None else exact(epochs) * count
        self._cursor, self._end = 0, self.pass_end(0)
        self._own_pass: tuple[int, int] | None = None
        # Forked workers share these pages; torch shares them with spawned ones as it pickles them.
        self._passes_2W = torch.frombuffer(mmap(-1, 16 * MAX_WORKERS), dtype=torch.int64).view(2, MAX_WORKERS)
        self._passes_2W[:] = torch.tensor([[self._cursor], [self._end]])

    def pass_end(self, position: int) -> int:
        """Return the end position of the pass that contains `position`: the end of its last batch."""
        if not self.pass_samples:
            return NEVER
        passes = position // self.pass_samples + 1
        return math.ceil(passes * self.pass_samples / self.batch_size) * self.batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        stride, offset = (worker.num_workers, worker.id) if worker else (1, 0)
        if stride > 1 and self.order.block > 1:
            raise ConfigError(
                f"shuffle_block: with {stride} workers, each would read every block; use num_workers 0 or 1"
            )
        # The minimum of the ends moves past a pass only when every worker has ended it, however late some begin. A pass
        # that was resumed at its very end is empty: then all starts are equal, and only the ends tell.
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
        self._finish_pass(offset, stride, end)

    def _finish_pass(self, worker: int, workers: int, end: int) -> None:
        following = torch.tensor([end, self.pass_end(end)])
        self._passes_2W[:, worker] = following
        if int(self._passes_2W[1, :workers].min()) > end:
            self._passes_2W[:] = following[:, None]  # all workers have ended: the next pass may have any number of them

    def batch(self, number: int, ahead: WindowReader | None = None) -> dict[str, Any]:
        """Read this rank's part of global batch `number`, counted from 0, as a pass yields it.

        Any thread may call it; the stream's position stays. Blocks come from `ahead`, if given, else from the cache.
        """
        positions = self.share.select(batch_positions(number, self.batch_size))
        numbers = self.numbers(positions)
        tensors = {"latents": self.show(numbers, positions, ahead), "mask": as_tensors(self._mask(numbers, positions))}
        if self._nulls:
            dropped = caption_dropped(positions, self.order.seed, self.caption_dropout)
            pairs = zip(tensors.items(), self._nulls, strict=True)
            tensors = {name: with_nulls(each, nulls, dropped) for (name, each), nulls in pairs}
        return {
            **{name: each if self._are_named else each[WORLD] for name, each in tensors.items() if each},
            "numbers": torch.from_numpy(numbers),
            "positions": torch.from_numpy(positions),
            "cursor": (number + 1) * self.batch_size,
        }

    def numbers(self, positions: Int64Array) -> Int64Array:
        """Return the numbers of the samples at `positions`."""
        indices = self.order.at(positions)
        return indices if self.samples is None else self.samples[indices]

    def read_ahead(self, end: int) -> WindowReader | None:
        """Return a reader that reads blocks ahead of their batches, up to `end`; None if the shuffle has no blocks."""
        if self.order.block == 1:
            return None
        return WindowReader(self.order, self.share, lambda at: self._read(self.numbers(at), at), end)

    def show(self, numbers: Int64Array, positions: Int64Array, ahead: WindowReader | None = None) -> dict[str, Tensor]:
        """Read the samples `numbers`, which are at `positions`, as training shows them: by name, [N, *shape] each."""
        latents = as_tensors(ahead(positions) if ahead else self._read(numbers, positions))
        for tower, (name, cache) in enumerate(self.cache.caches.items()):
            array = cache.spec.array
            if self.draw and array.encoder.posterior == "moments":
                latents[name] = sample_posterior(latents[name], self.order.seed, positions, tower)
            if self.normalize:
                latents[name] = normalize(latents[name], drawn_normalization(array.encoder))
        return latents

    def _read(self, numbers: Int64Array, positions: Int64Array) -> Samples:
        if isinstance(self.source, Views):
            return self.source.show(numbers, self.order.views_at(positions, len(self.source.views)))
        return self.source.read(numbers)

    def _mask(self, numbers: Int64Array, positions: Int64Array) -> Samples:
        if isinstance(self.source, Views):
            return self.source.show_mask(numbers, self.order.views_at(positions, len(self.source.views)))
        return self.cache.mask(numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position; the batch last yielded counts as consumed."""
        return {"cursor": self._cursor, "end": self._end, **self._must_match()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at `state["cursor"]`; everything else in `state` must match this stream."""
        now = self._must_match()
        if differences := differences_between({name: state.get(name, own) for name, own in now.items()}, now):
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
        """Refuse to be prepared by Accelerate for several processes; its loaders call this before each pass.

        They divide batches among the processes, and this stream has done so already: most samples would never be seen.
        """
        if self.share.world_size > 1 or (distributed.is_initialized() and distributed.get_world_size() > 1):
            raise ConfigError(
                "LatentStream was prepared by Accelerate, which would divide its batches among the processes again; "
                "give it rank= and world_size=, and take DataLoader(stream, batch_size=None) as it is, not prepared; "
                "with transformers' Trainer, return that from get_train_dataloader"
            )

    def _must_match(self) -> dict[str, Any]:
        order = self.order
        samples = "all" if self.samples is None else numbers_digest(self.samples)
        fields = {"cache": order.identity, "samples": samples, "seed": order.seed, "batch_size": self.batch_size}
        return {**fields, "shuffle_block": order.block}


def nulls_of(cache: JoinedCache) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return sample and mask of the null prompt of each cache of texts, by name; ConfigError if there is none."""
    if not (texts := cache.null_text()):
        raise ConfigError(f"caption_dropout: {cache!r} holds no texts")
    return as_tensors(texts), as_tensors(cache.null_mask())


def exact(epochs: float) -> Fraction:
    """Return the decimal that `epochs` is printed as: 0.1 of 40 samples is 4, not slightly more."""
    if not 0 < epochs <= MAX_EPOCHS:
        raise ConfigError(
            f"epochs must be above 0 and at most {MAX_EPOCHS:,}, or None for a pass that never ends, got {epochs}"
        )
    return Fraction(str(epochs))


def numbers_digest(numbers: np.ndarray) -> str:
    return f"{len(numbers):,}, sha256 {hashlib.sha256(np.asarray(numbers, np.int64).tobytes()).hexdigest()[:12]}"


def sample_posterior(moments_NMHW: Tensor, seed: int, positions: Iterable[int], tower: int = 0) -> Tensor:
    """Draw a latent for each sample, mean + std · noise: [N, C, H, W] float32, from moments of any dtype on the CPU.

    `positions` holds for each sample how many samples were shown before it. The result is a pure function of the
    moments and (seed, position, tower); `tower` gives the encoders of one image different noise. The noise comes from
    Philox (Salmon et al. 2011), a counter-based generator whose key is the seed and whose counter begins at the
    position, so it can be computed directly, in any batch, on any rank, after any resume.
    """
    count, moments, *cells = moments_NMHW.shape
    latents_NCHW = torch.empty(count, moments // 2, *cells)
    for latent_CHW, moments_MHW, position in zip(latents_NCHW.numpy(), moments_NMHW, positions, strict=True):
        # One sample at a time: in a batch, the last bits would depend on how it is split into vectors and threads.
        mean_CHW, logvar_CHW = np.split(moments_MHW.float().numpy(), 2)
        philox = Philox(key=[seed, tower], counter=[0, 0, 0, int(position)])
        Generator(philox).standard_normal(dtype=np.float32, out=latent_CHW)
        latent_CHW *= np.exp(logvar_CHW / 2)
        latent_CHW += mean_CHW
    return latents_NCHW


def as_tensors(samples: Samples) -> dict[str, Tensor]:
    return {name: as_tensor(each) for name, each in samples.items()}


def as_tensor(samples: np.ndarray) -> Tensor:
    """Return a tensor that shares the array's memory; numpy's bfloat16, unknown to torch, is converted by its bits."""
    if samples.dtype.name == "bfloat16":
        return torch.from_numpy(samples.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(samples)
