"""Opening everything a run works with: a verified cache, its text, the split, and the model at its initial state."""

from dataclasses import dataclass

import numpy as np
import torch

from cache_store import Cache, CacheError, open_cache
from cache_store.errors import ConfigError, ModelError
from cache_store.output_file import refuse_inside
from cache_store.schema import LATENTS
from cache_store.verify import verify
from trainer.batches import LatentSource, StepLoader
from trainer.chat import load_chat_tokenizer
from trainer.checkpoint import CACHE_IDENTITY
from trainer.config import TrainConfig
from trainer.language_model import LanguageModel, load_language_model
from trainer.model import WorldModel
from trainer.order import SampleOrder
from trainer.parallel import World
from trainer.projector import Projector
from trainer.stream import as_tensor
from trainer.text_store import Split, TextStore, refuse_other_text, text_folder
from trainer.text_writer import make_text

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
CALIBRATION_SAMPLES = 64


@dataclass(frozen=True, kw_only=True)
class Session:
    """What training and evaluation share."""

    config: TrainConfig
    world: World
    cache: Cache
    text: TextStore
    split: Split
    model: WorldModel
    loader: StepLoader
    must_match: dict[str, str]
    """What a checkpoint must have been trained with to be used here."""


def open_session(config: TrainConfig, world: World, source: LatentSource | None = None) -> Session:
    """Open and check all inputs; `source` stands in for the cache where latents come from elsewhere."""
    cache = open_sound_cache(config.cache, world)
    text = open_text(config, cache, world)
    split = text.split(config.data.val_fraction)
    announce_split(split, config, world)
    language = load_language_model(config.model.language_model, PRECISIONS[config.run.precision], world.device)
    loader = make_loader(config, world, source or cache, text, split.train, cache.seal.identity)
    projector = make_projector(config, cache, language, loader).to(world.device)
    world.share(projector)
    check_length(config, language, projector)
    check_vocabulary(config, language, text)
    must_match = what_must_match(config, cache, text, language)
    prepare(language, config)
    model = WorldModel(language, projector, begins_with_bos=text.meta.begins_with_bos)
    return Session(
        config=config, world=world, cache=cache, text=text, split=split, model=model, loader=loader,
        must_match=must_match,
    )  # fmt: skip


def open_sound_cache(path: str, world: World) -> Cache:
    if "://" in path:
        raise ConfigError(f"cache: {path} is a URL; the trainer reads local folders")
    cache = open_cache(path)
    world.on_main(lambda: verify(path, level="quick").raise_if_damaged())
    return cache


def open_text(config: TrainConfig, cache: Cache, world: World) -> TextStore:
    """The cache's text, tokenised by rank 0 where no run before has done it."""
    chat = load_chat_tokenizer(config.model.language_model, config.model.chat_template, config.data.max_text_tokens)
    folder = text_folder(cache, chat, config.data.text_dir)
    refuse_inside("data.text_dir", folder, cache.root)
    world.on_main(lambda: make_text(folder, cache, chat))
    store = TextStore(folder)
    refuse_other_text(folder, store.meta, cache)
    return store


def announce_split(split: Split, config: TrainConfig, world: World) -> None:
    if not len(split.train) and len(split.validation) == 0:
        raise CacheError(
            f"{config.cache} has no text to learn: none of its {split.unlabelled:,} samples has an assistant's words "
            f"within data.max_text_tokens {config.data.max_text_tokens}. LLaVA sources bring conversations; a folder "
            "brings captions in name.txt beside name.jpg"
        )
    if not len(split.train):
        raise CacheError(
            f"{config.cache} leaves no sample to train on: {split.unlabelled:,} have no assistant's words within "
            f"data.max_text_tokens {config.data.max_text_tokens}, {len(split.validation):,} are held out"
        )
    left_out = f", {split.unlabelled:,} without assistant's words left out" if split.unlabelled else ""
    world.say(f"samples: {len(split.train):,} to train on, {len(split.validation):,} held out{left_out}")


def make_loader(
    config: TrainConfig, world: World, source: LatentSource, text: TextStore, train: np.ndarray, identity: str
) -> StepLoader:
    """Of this rank; the cache's identity is part of the order."""
    return StepLoader(
        source=source,
        text=text,
        order=SampleOrder(identity, config.data.seed, len(train)),
        train=train,
        batch_size=config.data.batch_size,
        accumulate=config.data.accumulate,
        rank=world.rank,
        world_size=world.size,
        pin=world.device.type == "cuda",
    )


def make_projector(config: TrainConfig, cache: Cache, language: LanguageModel, loader: StepLoader) -> Projector:
    """A new projector, its output matched to the token embeddings on a fixed draw of training samples."""
    mean, std = latent_statistics(cache)
    projector = Projector(
        latent_shape=cache.spec.arrays[LATENTS].shape,
        width=language.width,
        layout=config.model.layout,
        shape=config.model.projector,
        mean=mean,
        std=std,
        seed=config.data.seed,
    )
    positions = np.arange(min(CALIBRATION_SAMPLES, len(loader.train)))
    latents = loader.source.read(loader.train[loader.order.at(positions)])
    projector.match_rms(as_tensor(latents), language.embedding_rms())
    return projector


def latent_statistics(cache: Cache) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each latent channel: the encoder's own, or measured where it states none."""
    array, summary = cache.spec.arrays[LATENTS], cache.seal.arrays[LATENTS]
    if array.encoder.latents_mean:
        return array.encoder.latents_mean, array.encoder.latents_std
    channels = array.shape[0] // 2 if array.encoder.posterior == "moments" else array.shape[0]
    return summary.channel_mean[:channels], summary.channel_std[:channels]


def check_length(config: TrainConfig, language: LanguageModel, projector: Projector) -> None:
    needed, known = projector.num_tokens + config.data.max_text_tokens, language.max_tokens
    if known is not None and needed > known:
        raise ConfigError(
            f"{projector.num_tokens} world tokens and data.max_text_tokens {config.data.max_text_tokens} make "
            f"{needed}; {config.model.language_model} knows {known} positions: set data.max_text_tokens to "
            f"{known - projector.num_tokens} or less, or take another model.layout or model"
        )


def check_vocabulary(config: TrainConfig, language: LanguageModel, text: TextStore) -> None:
    if text.meta.largest_token >= language.vocabulary:
        raise ModelError(
            f"model.language_model {config.model.language_model}: its tokenizer gives token {text.meta.largest_token}, "
            f"and the model embeds {language.vocabulary} tokens; the two do not belong together"
        )


def prepare(language: LanguageModel, config: TrainConfig) -> None:
    if config.run.gradient_checkpointing:
        language.checkpoint_layers()
    if config.run.compile:
        language.compile_decoder()


def what_must_match(config: TrainConfig, cache: Cache, text: TextStore, language: LanguageModel) -> dict[str, str]:
    """Whatever decides the global batches and the shape and meaning of the projector."""
    return {
        CACHE_IDENTITY: cache.seal.identity,
        "cache spec": cache.spec.digest,
        "tokenised text": text.meta.key,
        "data.batch_size": str(config.data.batch_size),
        "data.seed": str(config.data.seed),
        "data.val_fraction": str(config.data.val_fraction),
        "model.layout": config.model.layout,
        "model.projector": config.model.projector,
        "language model": language.identity(),
    }
