"""Samples as pictures: the latents of the first tower whose cache has a map to RGB."""

from collections.abc import Mapping, Sequence

import numpy as np

from cache_store import JoinedCache
from cache_store.gallery.pictures import preview


def previews(cache: JoinedCache, samples: Mapping[str, np.ndarray]) -> Sequence[np.ndarray | None]:
    """One of each sample, uint8 [H, W, 3]; None where no cache has such a map. `samples` are each tower's, by name."""
    for name, each in cache.caches.items():
        if (to_rgb := each.seal.array.preview) is not None:
            return [preview(latent, to_rgb) for latent in samples[name].astype(np.float32)]
    return [None] * len(next(iter(samples.values())))
