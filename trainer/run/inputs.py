"""The inputs of a run: a verified cache, a tokenizer and the models, checked against each other.

Tokenising a new data set takes minutes, so every check that does not need the text is done here, before it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from cache_store import Cache, JoinedCache, open_cache
from cache_store.errors import ConfigError
from cache_store.program.output_file import refuse_inside
from cache_store.verify.verify import verify
from trainer.config import DataConfig, TrainConfig
from trainer.data.views import has_moments, open_caches
from trainer.model.kernels import choose_attention
from trainer.model.language_model import LanguageModel
from trainer.model.load_language_model import Transformers, load_with_whole, refuse_no_language_model
from trainer.model.pretrained import pretrained_name
from trainer.model.projector import Projectors
from trainer.model.projector_file import (
    PROJECTOR_VERSION,
    ProjectorConfig,
    ReadBy,
    TextRule,
    Training,
    library_versions,
)
from trainer.model.towers import describe_towers, make_projectors, refuse_unread, tower_record
from trainer.run.checkpoint import CACHE_IDENTITY, DEFAULTS, POSTERIOR, SHUFFLE_BLOCK, TEXTS, VAL_FRACTION, WHERE
from trainer.run.parallel import World
from trainer.run.sharded import load_sharded
from trainer.text.chat import ChatTokenizer
from trainer.text.store import TEXT_VERSION, text_folder
from trainer.text.tokenizer import load_chat_tokenizer

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}

LANGUAGE_MODEL = "language model"
"""Key of `must_match`: the language model's identity."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything a run needs except its text."""

    config: TrainConfig
    world: World
    cache: JoinedCache
    """Each tower's cache, by its name."""
    chat: ChatTokenizer
    text_folder: Path
    """The folder of the samples' text, which may not exist yet."""
    language: LanguageModel
    whole: Any
    """transformers' whole model, which contains `language` and can generate."""
    projectors: Projectors
    """Before they are scaled to the language model's embeddings; scaling needs training samples."""
    draw: bool
    """Whether training draws latents from posterior moments."""
    must_match: dict[str, str]
    """Settings that a checkpoint must have been trained with to be used here."""
    projector_config: ProjectorConfig
    """The description in the projector's file, before the first step."""

    @property
    def in_step(self) -> bool:
        """Whether ranks share the language model, so that all must run it together."""
        return self.world.size > 1 and self.config.run.parallel == "fsdp2"

    def on_all(self, stopped: Callable[[], bool]) -> Callable[[], bool]:
        """Return a check whether any rank was stopped, if all must end together; else whether this one was."""
        return (lambda: self.world.any(stopped())) if self.in_step else stopped


def open_inputs(config: TrainConfig, world: World) -> Inputs:
    joined = open_sound_caches(config, world)
    refuse_unread(config.model, joined)
    draw = draws_latents(joined, config.data.posterior)
    refuse_no_language_model(config.model.language_model)
    chat = load_chat_tokenizer(config.model.language_model, config.model.chat_template, config.data.max_text_tokens)
    folder = text_folder(joined, chat, config.text_dir)
    for path in config.all_caches:
        refuse_inside("data.text_dir", folder, path)
    language, whole = load_language_model(config, world)
    projectors = make_projectors(config.model, joined.caches, language, config.data.seed)
    refuse_too_long(config, language, projectors)
    if config.run.attention != "auto":
        text, before = config.data.max_text_tokens, int(chat.begins_with_bos)
        block = projectors.sequence_blocks(text, before)
        block_1T = None if block is None else torch.tensor([block], device=world.device)
        choose_attention(language, config.run.attention, projectors.num_tokens + text, block_1T)
    description = describe_projectors(config, joined, chat, projectors, language)
    must_match = what_must_match(config, joined, chat, description, draw=draw)
    if config.run.gradient_checkpointing != "none":
        language.checkpoint_layers(config.run.gradient_checkpointing)
    if config.run.compile != "none":
        language.compile_decoder(config.run.compile)
    return Inputs(
        config=config, world=world, cache=joined, chat=chat, text_folder=folder, language=language, whole=whole,
        projectors=projectors, draw=draw, must_match=must_match, projector_config=description,
    )  # fmt: skip


def load_language_model(config: TrainConfig, world: World) -> tuple[LanguageModel, Transformers]:
    """Load the language model whole, or a part of it on each rank, as `run.parallel` says."""
    name, dtype = config.model.language_model, PRECISIONS[config.run.precision]
    if config.run.parallel == "fsdp2" and world.size > 1:
        return load_sharded(name, dtype, world)
    return load_with_whole(name, dtype, world.device)


def open_sound_caches(config: TrainConfig, world: World) -> JoinedCache:
    """Open each tower's cache, in all its views."""
    views = [{name: open_sound_cache(path, config.data, world) for name, path in view.items()} for view in config.views]
    return open_caches(views if len(views) > 1 else views[0])


def draws_latents(cache: JoinedCache, posterior: Literal["sample", "mean"] | None) -> bool:
    """Return whether training draws latents. ConfigError if `sample` is asked for and no tower has moments."""
    if posterior == "sample" and not has_moments(cache):
        raise ConfigError(
            f"data.posterior: sample needs posterior moments, and {cache.first.store} holds none: leave it out, or "
            "build a cache of them with `precompute build … --encoder.posterior moments`"
        )
    return posterior != "mean" and has_moments(cache)


def open_sound_cache(path: str, data: DataConfig, world: World) -> Cache:
    cache = open_cache(path, cache_dir=data.cache_dir, cache_bytes=data.cache_bytes)
    world.on_main(lambda: verify(path, level="quick").raise_if_damaged())
    return cache


def describe_projectors(
    config: TrainConfig, joined: JoinedCache, chat: ChatTokenizer, projectors: Projectors, language: LanguageModel
) -> ProjectorConfig:
    """Describe everything that is needed to use the projectors once they are trained."""
    towers = (tower_record(config.model, name, joined.caches[name], each) for name, each in projectors.items())
    return ProjectorConfig(
        format_version=PROJECTOR_VERSION,
        towers=tuple(towers),
        language_model=ReadBy(
            name=absolute_model_name(config.model.language_model),
            identity=language.identity(),
            width=language.width,
            precision=config.run.precision,
            opened_by=language.opened_by,
        ),
        text=TextRule(
            begins_with_bos=chat.begins_with_bos,
            chat_template=chat.template,
            content_in_parts=chat.has_content_parts,
            end_of_turn=chat.end_of_turn(),
        ),
        training=Training(steps=0, samples=0, val_fraction=config.data.val_fraction),
        versions=library_versions(),
    )


def absolute_model_name(model: str) -> str:
    """Return the hub id, or the absolute path of the folder."""
    name = pretrained_name(model)
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def refuse_too_long(config: TrainConfig, language: LanguageModel, projectors: Projectors) -> None:
    """Raise ConfigError if all towers' tokens and the longest text exceed the language model's positions."""
    tokens, known = projectors.num_tokens, language.max_tokens
    needed = tokens + config.data.max_text_tokens
    if known is not None and needed > known:
        left = known - tokens
        shorter = f"set data.max_text_tokens to {left} or less, or " if left > 1 else ""
        raise ConfigError(
            f"{tokens} world tokens and data.max_text_tokens {config.data.max_text_tokens} make "
            f"{needed}; {config.model.language_model} knows {known} positions: {shorter}"
            "take another model.layout or model"
        )


def what_must_match(
    config: TrainConfig, joined: JoinedCache, chat: ChatTokenizer, description: ProjectorConfig, *, draw: bool
) -> dict[str, str]:
    """Return the settings that decide the global batches and the shape and meaning of the projectors."""
    data = config.data
    shown = {POSTERIOR: "sample" if draw else "mean", SHUFFLE_BLOCK: str(data.shuffle_block), WHERE: data.where or ""}
    return {
        CACHE_IDENTITY: joined.identity,
        TEXTS: joined.texts_digest,
        **describe_towers(description.towers),
        **chat.facts,
        "text version": str(TEXT_VERSION),
        "data.batch_size": str(data.batch_size),
        "data.seed": str(data.seed),
        **dict(shown.items() - DEFAULTS.items()),
        VAL_FRACTION: str(data.val_fraction),
        LANGUAGE_MODEL: description.language_model.identity,
    }
