"""Frozen image encoders: which classes are known, and one function that loads any of them.

A new encoder is a loader from model files to a `FrozenVae`, and a line in `ENCODERS`.
"""

from collections.abc import Callable

from cache_store.errors import ModelError
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import Encoder, FrozenVae, PixelRange
from precompute.encoders.model_files import ModelFiles, find_model

__all__ = ["ENCODERS", "Encoder", "EncoderConfig", "PixelRange", "load_encoder"]


def load_wan(files: ModelFiles, config: EncoderConfig) -> FrozenVae:
    """See `wan.load_wan`; imported late, because diffusers takes seconds and `--help` needs none of it."""
    from precompute.encoders import wan

    return wan.load_wan(files, config)


ENCODERS: dict[str, Callable[[ModelFiles, EncoderConfig], FrozenVae]] = {"AutoencoderKLWan": load_wan}
"""diffusers class, as a model's config.json names it, to its loader."""


def load_encoder(config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
    """The frozen encoder that `config` names, ready on its device; pixels enter it in `pixel_range`."""
    files = find_model(config.model)
    if files.class_name not in ENCODERS:
        raise ModelError(
            f"encoder.model {config.model} is of class {files.class_name}; known are {', '.join(sorted(ENCODERS))}"
        )
    return Encoder(ENCODERS[files.class_name](files, config), config, pixel_range)
