"""The family of text encoders that transformers runs; torch and transformers are imported when one is loaded."""

from collections.abc import Mapping
from typing import Any

from precompute.encoders.config import OF_TEXTS, EncoderConfig
from precompute.encoders.encoder import Encoder, PixelRange
from precompute.encoders.family import Family
from precompute.encoders.model_files import ModelFiles
from precompute.encoders.texts.held import Held


def text_family(held: Mapping[str, Held]) -> Family:
    """The family whose checkpoints keep text encoders where `held` says, by their class."""

    def load(files: ModelFiles, config: EncoderConfig, pixel_range: PixelRange) -> Encoder:
        from precompute.encoders.texts.transformers_text import load_text_encoder

        return load_text_encoder(files, held[files.class_name], config)

    return Family(load=load, refuse_size=any_size, takes=("layer", *OF_TEXTS))


def any_size(config: Mapping[str, Any], height: int, width: int) -> None:
    """It reads no images."""
