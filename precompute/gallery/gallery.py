"""`precompute gallery`: the gallery of `cache_store`, with what the VAE's decoder makes of the latents."""

# Axes: N images, C latent channels, H W latent cells, Y X pixels, 3 RGB.

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cache_store.cache.reader import open_cache
from cache_store.gallery.exhibits import Decode
from cache_store.gallery.gallery import make_gallery
from cache_store.gallery.page import Gallery
from cache_store.refusal import Difference, refuse
from cache_store.storage.store import Address
from precompute.config import BuildConfig, DecodedGalleryConfig, where_remembered
from precompute.encoders.registry import load_decoder


def gallery(cache: Address, config: DecodedGalleryConfig) -> Gallery:
    """Write the page and the contact sheets; StaleError where the VAE is not the one that made the cache."""
    return make_gallery(cache, config, open_decoder(cache, config) if config.decode else None)


def open_decoder(cache: Address, config: DecodedGalleryConfig) -> Decode:
    """From stored latents to pictures, by the VAE that the cache was made with.

    A checkpoint is whole: where its encode path is the cache's, its decoder is the one trained with it, or was
    finetuned on it.
    """
    identity = open_cache(cache).spec.array.encoder
    recorded = BuildConfig.of_cache(cache).encoder
    encoder = replace(recorded, model=config.model or recorded.model, device=config.device)
    with where_remembered(cache) if config.model is None else nullcontext():
        decode, weights_sha256 = load_decoder(encoder)
    if weights_sha256 != identity.weights_sha256:
        difference = Difference("sha256 of the encode path", identity.weights_sha256, weights_sha256)
        refuse(f"{encoder.model} is not the model that made the cache", [difference], ["name that one with --model"])

    def pictures(latent_NCHW: np.ndarray) -> np.ndarray:
        latents = torch.from_numpy(latent_NCHW.astype(np.float32))
        mean_NCHW = latents.chunk(2, dim=1)[0] if identity.posterior == "moments" else latents
        return to_uint8(decode(mean_NCHW))

    return pictures


def to_uint8(image_N3YX: Tensor) -> np.ndarray:
    """RGB in [-1, 1], which a VAE's decoder gives whatever range its encoder was fed, as uint8 [N, Y, X, 3]."""
    levels_N3YX = image_N3YX.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    return levels_N3YX.permute(0, 2, 3, 1).cpu().numpy()
