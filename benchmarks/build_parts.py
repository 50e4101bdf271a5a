"""The work that `benchmarks.build` times: a whole build, its decoding alone and its encoding alone."""

import shutil
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from cache_store.cache.metadata import read_spec
from cache_store.storage.store import open_store
from demo.vae import random_vae
from precompute.config import BuildConfig
from precompute.encode.batches import Decoders, decoded_batches, planned_batches
from precompute.encode.progress import Encoded
from precompute.encode.worker import ENCODER_THREADS
from precompute.encoders.registry import load_encoder
from precompute.rerun.steps import build
from precompute.sources import open_source

# Axes: N images of a batch, Y X pixels, 3 RGB.


def save_vae(folder: Path, size: str) -> None:
    torch.manual_seed(0)
    vae = random_vae(0) if size == "demo" else AutoencoderKLWan(decoder_base_dim=8)
    vae.save_pretrained(folder / "vae")


class Parts:
    """A build of a folder of images, which is done once at the start, and its parts."""

    def __init__(self, config: BuildConfig) -> None:
        self.encoded: list[Encoded] = []
        """Encoding figures of every build, in order."""
        self._config, self._source = config, open_source(config.source)
        self.build()
        self._store = open_store(config.cache)
        self._spec = read_spec(self._store)
        self._encoder = load_encoder(config.encoder, config.image.range)
        self._pixels_NYX3 = self.decode(1)

    def build(self) -> None:
        """Plan, load the encoder, encode, seal."""
        shutil.rmtree(self._config.cache, ignore_errors=True)
        self.encoded.append(build(self._config).encoded)

    def decode(self, threads: int) -> list[np.ndarray]:
        """Read, hash, decode and fit, batch by batch."""
        batches = planned_batches(self._store, self._spec, range(self._spec.num_shards))
        with Decoders(threads) as pool:
            return [batch.pixels_NYX3 for batch in decoded_batches(batches, pool, self._source) if batch.wait()]

    def encode(self) -> None:
        torch.set_num_threads(ENCODER_THREADS)
        for batch_NYX3 in self._pixels_NYX3:
            self._encoder.encode(torch.from_numpy(batch_NYX3)).cpu()
