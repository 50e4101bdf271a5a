"""`precompute gallery`: the gallery of `cache_store`, with latents decoded to images by the VAE."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cache_store.cache.reader import open_cache
from cache_store.gallery.gallery import Gallery, make_gallery
from cache_store.gallery.rows import Decode
from cache_store.messages import Difference, refuse
from cache_store.storage.store import Address
from precompute.config import BuildConfig, DecodedGalleryConfig, advising_on_moved_paths
from precompute.encoders.registry import load_decoder

# Axes: N images, C latent channels, H W latent cells, Y X pixels, 3 RGB.


def gallery(cache: Address, config: DecodedGalleryConfig) -> Gallery:
    """Write the page; raise StaleError if the VAE is not the one that made the cache."""
    return make_gallery(cache, config, open_decoder(cache, config) if config.decode else None)


def open_decoder(cache: Address, config: DecodedGalleryConfig) -> Decode:
    """Make a function from stored latents to pictures, with the VAE that made the cache.

    If a checkpoint's encode path is the cache's, its decoder was trained with it, or finetuned on it.
    """
    identity = open_cache(cache).spec.array.encoder
    recorded = BuildConfig.of_cache(cache).encoder
    encoder = replace(recorded, model=config.model or recorded.model, device=config.device)
    with advising_on_moved_paths(cache) if config.model is None else nullcontext():
        decode, weights_sha256 = load_decoder(encoder)
    if weights_sha256 != identity.weights_sha256:
        difference = Difference("sha256 of the encode path", identity.weights_sha256, weights_sha256)
        refuse(f"{encoder.model} is not the model that made the cache", [difference], ["give that model with --model"])

    def pictures(latent_NCHW: np.ndarray) -> np.ndarray:
        latents = torch.from_numpy(latent_NCHW.astype(np.float32))
        mean_NCHW = latents.chunk(2, dim=1)[0] if identity.posterior == "moments" else latents
        return to_uint8(decode(mean_NCHW))

    return pictures


def to_uint8(image_N3YX: Tensor) -> np.ndarray:
    """Convert RGB in [-1, 1], the decoder's range for every encoder range, to uint8 [N, T, Y, X, 3].

    The frames of [N, 3, T, Y, X] may be left out if there is one.
    """
    levels = image_N3YX.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8).movedim(1, -1)
    return levels.reshape(len(levels), -1, *levels.shape[-3:]).cpu().numpy()
