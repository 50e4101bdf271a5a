"""`precompute gallery`: the gallery of `cache_store`, with what the VAE's decoder makes of the latents."""

# Axes: N images, C latent channels, H W latent cells, Y X pixels, 3 RGB.

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cache_store.errors import ConfigError, ModelError
from cache_store.gallery.config import GalleryConfig
from cache_store.metadata import read_build
from cache_store.reader import open_cache
from cache_store.schema import EncoderIdentity
from cache_store.staleness import Difference, refuse
from precompute.config import BuildConfig
from precompute.encoders import EncoderConfig
from precompute.encoders.model_files import ModelFiles, find_model

if TYPE_CHECKING:
    from cache_store.gallery.exhibits import Decode
    from cache_store.gallery.gallery import Gallery


@dataclass(frozen=True, kw_only=True)
class DecodedGalleryConfig(GalleryConfig):
    """Show rows of a cache on one self-contained HTML page; with --decode, beside what the VAE makes of them."""

    decode: bool = False
    """Add decoded images, error maps and PSNR."""
    model: str | None = None
    """Where the VAE is now, if not where the build found it: a hub id or a folder."""
    device: str = "auto"
    """Where to decode: auto (a GPU if there is one), cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.decode and (self.model is not None or self.device != "auto"):
            raise ConfigError("--model and --device are for --decode; add it or leave them out")


def gallery(root: Path, config: DecodedGalleryConfig) -> "Gallery":
    """Write the page and the contact sheets; StaleError where the VAE is not the one that made the cache."""
    from cache_store.gallery.gallery import make_gallery  # pulls in matplotlib

    return make_gallery(root, config, open_decoder(root, config) if config.decode else None)


def open_decoder(root: Path, config: DecodedGalleryConfig) -> "Decode":
    """From stored latents to pictures, by the VAE that the cache was made with."""
    identity = open_cache(root).array_spec(config.array).encoder
    recorded = BuildConfig.from_record(root, read_build(root).config).encoder
    encoder = replace(recorded, model=config.model or recorded.model, device=config.device)
    decode = load_decoder(encoder, identity)

    def pictures(latent_NCHW: np.ndarray) -> np.ndarray:
        latents = torch.from_numpy(latent_NCHW.astype(np.float32))
        mean_NCHW = latents.chunk(2, dim=1)[0] if identity.posterior == "moments" else latents
        return to_uint8(decode(mean_NCHW))

    return pictures


def load_decoder(config: EncoderConfig, identity: EncoderIdentity) -> Callable[[Tensor], Tensor]:
    """The decoder that belongs to the encoder of `identity`.

    A checkpoint is whole: where its encode path is the cache's, its decoder is the one trained with it, or was
    finetuned on it.
    """
    files = find_model(config.model)
    if files.class_name not in DECODERS:
        raise ModelError(f"encoder.model {config.model} is of class {files.class_name}, whose decoder is not known")
    decode, weights_sha256 = DECODERS[files.class_name](files, config.torch_device)
    if weights_sha256 != identity.weights_sha256:
        difference = Difference("sha256 of the encode path", identity.weights_sha256, weights_sha256)
        refuse(f"{config.model} is not the model that made the cache", [difference], ["name that one with --model"])
    return decode


def load_wan_decoder(files: ModelFiles, device: torch.device) -> tuple[Callable[[Tensor], Tensor], str]:
    """See `wan_decoder.load_wan_decoder`; imported late, because diffusers takes seconds."""
    from precompute.encoders import wan_decoder

    return wan_decoder.load_wan_decoder(files, device)


DECODERS = {"AutoencoderKLWan": load_wan_decoder}
"""diffusers class, as a model's config.json names it, to the loader of its decoder."""


def to_uint8(image_N3YX: Tensor) -> np.ndarray:
    """RGB in [-1, 1], which a VAE's decoder gives whatever range its encoder was fed, as uint8 [N, Y, X, 3]."""
    levels_N3YX = image_N3YX.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    return levels_N3YX.permute(0, 2, 3, 1).cpu().numpy()
