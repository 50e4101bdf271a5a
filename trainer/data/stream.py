"""Latents in training order: for the trainer, and for your own training loop.

The position is the number of samples consumed. Global batch k covers the positions [k·B, (k+1)·B) of an endless
sequence of epochs, and is of one size (`trainer/data/buckets.py`). Rank r of R takes the r-th contiguous part of it;
DataLoader worker w of W takes every W-th batch, which the DataLoader puts back in order. With `remainder: short`, the
last positions of a batch may stay empty.

A pass covers `epochs` epochs, and the next pass continues where it ended (`trainer/data/passes.py`). An epoch of n
samples has n positions, and with `remainder: short` or `repeat` a whole number of batches. A sample of weight w counts
as w.
"""

import hashlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from cache_store import JoinedCache
from cache_store.cache.reader import valid_numbers
from cache_store.errors import ConfigError
from cache_store.format.normalization import drawn_normalization, normalize, refuse_unstated
from trainer.config import MAX_EPOCHS
from trainer.data.buckets import Places, Remainder, group_by_size, make_order, sizes_of
from trainer.data.draws import as_tensors, caption_dropped, refuse_rate, sample_posterior, with_nulls
from trainer.data.order import Int64Array, RankShare, is_in, whole
from trainer.data.passes import BatchStream
from trainer.data.prefetch import Samples, WindowReader
from trainer.data.views import Caches, Views, are_named, has_moments, open_caches
from trainer.model.model_config import WORLD

MAX_WEIGHT = 10**6
"""A larger weight is taken for a mistake."""

# Axes: N samples.


class LatentSource(Protocol):
    """Stands in for a cache, such as the encoders themselves."""

    def read(self, numbers: np.ndarray) -> Samples:
        """Read samples in the order of `numbers`, by cache; a cache alone is named `world`."""


class LatentStream(BatchStream):
    """Batches of latents in the keyed order of samples; the same for any number of DataLoader workers.

    Yields `latents` [batch_size / world_size, *shape] in the cache's dtype, of one image size (for joined caches, a
    mapping of names to tensors), `numbers` (sample numbers, for `cache.samples`), `positions` (of each sample, for
    `sample_posterior`) and `cursor`, the position after the batch. Caches of texts add `mask` [batch_size / world_size,
    tokens], bool, False at padding (for joined caches, a mapping too).
    `load_state_dict({"cursor": …})` resumes there: the next pass holds what was left of that one. If you leave a pass
    before its end, the next one begins where it began; with workers, first load the cursor of the last batch.
    With workers, take `DataLoader(stream, batch_size=None, num_workers=W)` and save the cursor of the last batch: the
    workers hold copies, so this object's `state_dict` does not advance. For a cache in an object store, add
    `multiprocessing_context="spawn"`.

    Args:
        cache: An open cache or its path. A mapping of names to paths is joined (`cache_store.open_joined`). A list
            holds views: caches of one plan that show the same images differently. Each sample shows them in turn.
        batch_size: Size of the global batch. A pass's last batch is filled from the next epoch; see `remainder`.
        samples: Numbers of the samples to show, such as a training split; an epoch shows each once. Default: all.
        weights: How often an epoch shows each of `samples` (by default, of all samples): whole numbers, 0 for never.
            An epoch is their sum. For halves, double all weights and halve `epochs`.
        seed: Seed of the order, and of latents that are drawn.
        epochs: Length of a pass; None: it never ends.
        rank: The part of each global batch that this process reads, in [0, world_size).
        world_size: Number of parts; it divides `batch_size`.
        remainder: What happens to the samples of each image size that do not fill a batch at an epoch's end. `carry`:
            they go into the next epoch: each sample is shown once in each epoch of its size, but not once in each pass.
            `short`: each epoch shows each sample once, and the last batch of each size is short. `repeat`: the last
            batch of each size is filled with samples of that size again.
        shuffle_block: Above 1, that many neighbours are read together, ahead of their batches, and held while they are
            shown (`trainer/data/order.py`). It allows at most one worker; threads read ahead.
        draw: Whether to draw a latent from posterior moments at each position, float32, by `sample_posterior`.
        normalize: Whether to give latents as the encoder's diffusion models are trained on them, float32; from moments,
            a latent is drawn first.
        caption_dropout: Share of positions at which the null prompt takes the place of every text;
            `trainer.caption_dropped` says which.
        source: Gives samples in place of the cache, by the names of its caches.

    Raises ConfigError without samples or for contradicting options, IndexError for a number that the cache lacks.
    """

    def __init__(
        self,
        cache: Caches,
        batch_size: int,
        *,
        samples: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        seed: int = 0,
        epochs: float | None = 1,
        rank: int = 0,
        world_size: int = 1,
        remainder: Remainder = "carry",
        shuffle_block: int = 1,
        draw: bool = False,
        normalize: bool = False,
        caption_dropout: float = 0.0,
        source: LatentSource | None = None,
    ) -> None:
        share = RankShare(batch_size, rank, world_size)
        self.cache, self._are_named = open_caches(cache), are_named(cache)
        self.source: LatentSource = self.cache if source is None else source
        if draw and not has_moments(self.cache):
            raise ConfigError(f"draw: {self.cache.first.store} holds no posterior moments to draw from")
        for each in self.cache.caches.values() if normalize else ():
            refuse_unstated(each.spec.array.encoder)
        self.draw, self.normalize = draw or normalize, normalize
        refuse_rate(caption_dropout)
        self.caption_dropout = caption_dropout
        self._nulls = (
            (as_tensors(self.cache.null_text()), as_tensors(self.cache.null_mask())) if caption_dropout else ()
        )
        if caption_dropout and not any(self._nulls):
            raise ConfigError(f"caption_dropout: {self.cache!r} holds no texts")
        total = len(self.cache)
        chosen = None if samples is None else valid_numbers(samples, total)
        if not (total if chosen is None else len(chosen)):
            where = f"{self.cache.first.store} holds none" if chosen is None else "samples is empty"
            raise ConfigError(f"there are no samples to show: {where}")
        self.sizes = sizes_of(self.cache)
        repeats = None if weights is None else whole_weights(weights, total if chosen is None else len(chosen))
        counts, self._numbers = group_by_size(self.sizes, total, chosen, repeats)
        self._samples = "all" if chosen is None else numbers_digest(chosen)
        self._weights = "none" if repeats is None else numbers_digest(repeats)
        self.remainder = remainder
        self.order = make_order(self.cache.identity, whole("seed", seed), counts, batch_size, shuffle_block, remainder)
        self.order.refuse_ranks(world_size, self.sizes.names)
        super().__init__(share, None if epochs is None else exact(epochs) * self.order.epoch_positions)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if (worker := get_worker_info()) and worker.num_workers > 1 and self.order.block > 1:
            raise ConfigError(
                f"shuffle_block: with {worker.num_workers} workers, each would read every block; use num_workers 0 or 1"
            )
        return super().__iter__()

    def batch(self, number: int, ahead: WindowReader | None = None) -> dict[str, Any]:
        """Read this rank's part of global batch `number`, counted from 0, as a pass yields it; any thread may call."""
        positions = self.share.of_batch(self.order.batch(number))
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
        return self._numbers[self.order.at(positions)]

    def read_ahead(self, end: int) -> WindowReader | None:
        if self.order.block == 1:
            return None
        return WindowReader(
            self.order, self.share, lambda at: self._read(self._numbers[self.order.indices(at)], at), end
        )

    def show(self, numbers: Int64Array, positions: Int64Array, ahead: WindowReader | None = None) -> dict[str, Tensor]:
        """Read the samples `numbers`, which are at `positions`, as training shows them: by name, [N, *shape] each."""
        latents = as_tensors(ahead(positions) if ahead else self._read(numbers, self.order.places(positions)))
        for tower, (name, cache) in enumerate(self.cache.caches.items()):
            array = cache.spec.array
            if self.draw and array.encoder.posterior == "moments":
                latents[name] = sample_posterior(latents[name], self.order.seed, positions, tower)
            if self.normalize:
                latents[name] = normalize(latents[name], drawn_normalization(array.encoder), array.channel_axis)
        return latents

    def _read(self, numbers: Int64Array, places: Places) -> Samples:
        if isinstance(self.source, Views):
            return self.source.show(numbers, self.order.views(places, len(self.source.views)))
        return self.source.read(numbers)

    def _mask(self, numbers: Int64Array, positions: Int64Array) -> Samples:
        if isinstance(self.source, Views) and self.source.has_masks:
            places = self.order.places(positions)
            return self.source.show(numbers, self.order.views(places, len(self.source.views)), JoinedCache.mask_rows)
        return self.cache.mask(numbers)

    def must_match(self) -> dict[str, Any]:
        return {
            "cache": self.order.identity,
            "samples": self._samples,
            "seed": self.order.seed,
            "batch_size": self.batch_size,
            "weights": self._weights,
            "shuffle_block": self.order.block,
            "remainder": self.remainder,
            "draw": self.draw,
            "normalize": self.normalize,
            "caption_dropout": self.caption_dropout,
        }


def exact(epochs: float) -> Fraction:
    """Return the decimal that `epochs` is printed as: a tenth of 40 samples is 4, not slightly more."""
    if not is_in(0, epochs, MAX_EPOCHS) or epochs == 0:
        raise ConfigError(
            f"epochs must be above 0 and at most {MAX_EPOCHS:,}, or None for a pass that never ends, got {epochs!r}"
        )
    return Fraction(str(epochs))


def whole_weights(weights: np.ndarray, count: int) -> Int64Array:
    given = np.asarray(weights)
    if given.shape != (count,) or given.dtype.kind not in "biuf":
        raise ConfigError(f"weights must be {count:,} numbers, one a sample, got {given.dtype} {list(given.shape)}")
    faulty = given[~((given >= 0) & (given <= MAX_WEIGHT) & (given == np.floor(given)))]
    if faulty.size:
        raise ConfigError(
            f"weights must be whole numbers in [0, {MAX_WEIGHT:,}], got {faulty[0]}; for fractions, multiply all "
            "weights, and divide `epochs`, by one number"
        )
    if not given.any():
        raise ConfigError("weights are all 0: there are no samples to show")
    return given.astype(np.int64)


def numbers_digest(numbers: np.ndarray) -> str:
    return f"{len(numbers):,}, sha256 {hashlib.sha256(np.asarray(numbers, np.int64).tobytes()).hexdigest()[:12]}"
