"""The frozen encoders in the step, in the place of a cache: what caching saves, by the same report.

Images are read from the sources that the caches were built from, and encoded by the packages that know how.
"""

import numpy as np
import torch
from PIL import Image

from cache_store import Cache, JoinedCache
from cache_store.cache.images import EncodeImages, find_source_images, open_image_encoder
from cache_store.errors import ConfigError, EncodeOnceError
from trainer.data.windows import Samples
from trainer.model.phases import phase
from trainer.model.towers import encoder_model


class LiveEncoder:
    """Gives samples as the caches would, from images."""

    def __init__(self, cache: JoinedCache, device: torch.device) -> None:
        self._cache = cache
        try:
            self._images = {name: find_source_images(each.store) for name, each in cache.caches.items()}
            self._encoders = {name: open_encoder(each, device) for name, each in cache.caches.items()}
        except EncodeOnceError as error:
            raise type(error)(f"--live-encoder: {error}") from None

    def read(self, numbers: np.ndarray) -> Samples:
        uris = self._cache.samples(numbers, columns=["uri"])["uri"].to_pylist()
        return {name: self._encode(name, uris) for name in self._encoders}

    def _encode(self, name: str, uris: list[str]) -> np.ndarray:
        with phase("image decoding"):
            images: list[Image.Image] = [self._images[name](uri)[0] for uri in uris]
        with phase("live encoder"):
            return self._encoders[name](images)


def open_encoder(cache: Cache, device: torch.device) -> EncodeImages:
    if (model := encoder_model(cache)) is None:
        raise ConfigError(f"{cache.store} does not know where its encoder is")
    return open_image_encoder(cache.spec.array, model, str(device))
