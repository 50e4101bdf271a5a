"""The inputs of a run: a verified cache, a tokenizer and the models, checked against each other.

Tokenising a new data set takes minutes, so everything that can be refused before it is refused here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import asdict

from cache_store import Cache, JoinedCache, open_cache, open_joined
from cache_store.cache.metadata import read_build
from cache_store.errors import ConfigError
from cache_store.format.names import BUILD_FILE
from cache_store.format.schema import ArraySpec
from cache_store.program.output_file import refuse_inside
from cache_store.verify.verify import verify
from trainer.config import WORLD, TrainConfig
from trainer.data.posterior import sampled_towers
from trainer.model.language_model import LanguageModel, load_with_whole
from trainer.model.pretrained import pretrained_name
from trainer.model.projector import Projector
from trainer.model.projector_file import (
    PROJECTOR_VERSION,
    ProjectorConfig,
    ReadBy,
    TextRule,
    Tower,
    Training,
    library_versions,
)
from trainer.run.checkpoint import CACHE_IDENTITY, POSTERIOR, VAL_FRACTION
from trainer.run.parallel import World
from trainer.text.chat import ChatTokenizer, load_chat_tokenizer
from trainer.text.store import TEXT_VERSION, text_folder

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}

LANGUAGE_MODEL = "language model"
"""Key of `must_match`: its identity."""

ANY_PICTURE = ("max_pixels", "flip")
"""Fields of an image recipe that decide which picture is encoded, not what its latent means."""

ENCODER_FIELDS = ("class_name", "weights_sha256", "posterior", "latents_mean", "latents_std")
"""Fields of an encoder's identity that decide what its latents mean."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything a run needs except its text."""

    config: TrainConfig
    world: World
    cache: JoinedCache
    """Each tower's cache, by its name."""
    chat: ChatTokenizer
    text_folder: Path
    """Where the samples' text is, or will be."""
    language: LanguageModel
    whole: Any
    """transformers' model that it is a part of, which can generate."""
    projector: Projector
    """Not yet scaled to the language model's embeddings, which needs training samples."""
    sampled: tuple[str, ...]
    """Towers whose latents training draws from their posteriors."""
    must_match: dict[str, str]
    """What a checkpoint must have been trained with to be used here."""
    projector_config: ProjectorConfig
    """What a projector's file says of it, before its first step."""


def open_inputs(config: TrainConfig, world: World) -> Inputs:
    (cache,) = (joined := open_joined({WORLD: open_sound_cache(config.cache, world)})).caches.values()
    refuse_other_axes(config.cache, cache.spec.array)
    sampled = sampled_towers(joined, config.data.posterior)
    chat = load_chat_tokenizer(config.model.language_model, config.model.chat_template, config.data.max_text_tokens)
    folder = text_folder(joined, chat, config.data.text_dir)
    refuse_inside("data.text_dir", folder, cache.root)
    language, whole = load_with_whole(config.model.language_model, PRECISIONS[config.run.precision], world.device)
    projector = make_projector(config, cache, language)
    refuse_too_long(config, language, projector)
    must_match = what_must_match(config, cache, chat, language) | ({POSTERIOR: "sample"} if sampled else {})
    if config.run.gradient_checkpointing:
        language.checkpoint_layers()
    if config.run.compile:
        language.compile_decoder()
    return Inputs(
        config=config, world=world, cache=joined, chat=chat, text_folder=folder, language=language, whole=whole,
        projector=projector, sampled=sampled, must_match=must_match,
        projector_config=describe_projector(config, cache, chat, projector, must_match[LANGUAGE_MODEL], language.width),
    )  # fmt: skip


def open_sound_cache(path: str, world: World) -> Cache:
    if "://" in path:
        raise ConfigError(f"cache: {path} is a URL; the trainer reads local folders")
    cache = open_cache(path)
    world.on_main(lambda: verify(path, level="quick").raise_if_damaged())
    return cache


def refuse_other_axes(path: str, array: ArraySpec) -> None:
    """Raise ConfigError where a sample is not the latent of a VAE."""
    if len(array.shape) != 3 or array.feature_place != 0:
        raise ConfigError(
            f"cache: {path} holds [{array.named_shape}] for each image; the projector reads latents of a VAE, "
            "[channel, latent_y, latent_x]"
        )


def make_projector(config: TrainConfig, cache: Cache, language: LanguageModel) -> Projector:
    mean, std = latent_statistics(cache)
    return Projector(
        latent_shape=cache.spec.array.shape,
        width=language.width,
        layout=config.model.layout,
        shape=config.model.projector,
        mean=mean,
        std=std,
        seed=config.data.seed,
    )


def latent_statistics(cache: Cache) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each latent channel: the encoder's own, else measured over the cache."""
    array, summary = cache.spec.array, cache.seal.array
    if array.encoder.latents_mean:
        return array.encoder.latents_mean, array.encoder.latents_std
    channels = array.shape[0] // 2 if array.encoder.posterior == "moments" else array.shape[0]
    return summary.mean[:channels], summary.std[:channels]


def describe_projector(
    config: TrainConfig, cache: Cache, chat: ChatTokenizer, projector: Projector, identity: str, width: int
) -> ProjectorConfig:
    """Say all that has to be known to use the projector once it is trained."""
    tower = Tower(
        name=WORLD,
        projector=config.model.projector,
        layout=config.model.layout,
        ends=True,
        tokens=projector.num_tokens,
        features=projector.num_features,
        array=cache.spec.array,
        encoder_model=encoder_model(cache),
        cache_identity=cache.seal.identity,
    )
    return ProjectorConfig(
        format_version=PROJECTOR_VERSION,
        towers=(tower,),
        language_model=ReadBy(
            name=lasting_name(config.model.language_model),
            identity=identity,
            width=width,
            precision=config.run.precision,
        ),
        text=TextRule(
            begins_with_bos=chat.begins_with_bos, chat_template=chat.template, end_of_turn=chat.end_of_turn()
        ),
        training=Training(steps=0, samples=0, val_fraction=config.data.val_fraction),
        versions=library_versions(),
    )


def encoder_model(cache: Cache) -> str | None:
    """Return where the cache's build found its encoder, where the cache remembers that."""
    if not cache.store.has(BUILD_FILE):
        return None
    model = read_build(cache.store).config.get("encoder", {}).get("model")
    return model if isinstance(model, str) else None


def lasting_name(model: str) -> str:
    """Return the hub id, or the folder such that it is found from any other folder."""
    name = pretrained_name(model)
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def refuse_too_long(config: TrainConfig, language: LanguageModel, projector: Projector) -> None:
    """Raise ConfigError where world tokens and text may be longer than the language model reads."""
    needed, known = projector.num_tokens + config.data.max_text_tokens, language.max_tokens
    if known is not None and needed > known:
        left = known - projector.num_tokens
        shorter = f"set data.max_text_tokens to {left} or less, or " if left > 1 else ""
        raise ConfigError(
            f"{projector.num_tokens} world tokens and data.max_text_tokens {config.data.max_text_tokens} make "
            f"{needed}; {config.model.language_model} knows {known} positions: {shorter}"
            "take another model.layout or model"
        )


def what_must_match(config: TrainConfig, cache: Cache, chat: ChatTokenizer, language: LanguageModel) -> dict[str, str]:
    """Collect what decides the global batches and the shape and meaning of the projector."""
    return {
        CACHE_IDENTITY: cache.seal.identity,
        **what_latents_mean(cache.spec.array),
        "tokenised text": f"{chat.digest}, version {TEXT_VERSION}",
        "data.batch_size": str(config.data.batch_size),
        "data.seed": str(config.data.seed),
        VAL_FRACTION: str(config.data.val_fraction),
        "model.layout": config.model.layout,
        "model.projector": config.model.projector,
        LANGUAGE_MODEL: language.identity(),
    }


def what_latents_mean(array: ArraySpec) -> dict[str, str]:
    """Describe the pixels and the encoder that latents come from.

    Not dtype and batch size, which only round; nor a flip: a projector reads a flipped picture as any other.
    """
    image = {f"image.{name}": value for name, value in asdict(array.image).items() if name not in ANY_PICTURE}
    encoder = {f"encoder.{name}": getattr(array.encoder, name) for name in ENCODER_FIELDS}
    return {name: str(value) for name, value in {"latents.shape": array.shape, **image, **encoder}.items()}
