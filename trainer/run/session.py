"""What training and evaluation share: verified caches, their text and its split, and the model."""

from collections.abc import Callable
from pathlib import Path

import torch

from cache_store import Cache, CacheError, JoinedCache, open_cache
from cache_store.errors import ConfigError, ModelError
from cache_store.format.record import FORMAT_VERSION
from cache_store.program.output_file import refuse_inside
from cache_store.storage.store import is_url
from cache_store.verify.verify import verify
from trainer.config import TrainConfig
from trainer.data.batches import StepLoader
from trainer.data.draws import as_tensor
from trainer.data.stream import LatentSource, LatentStream
from trainer.data.views import has_moments, open_caches
from trainer.model.kernels import choose_attention
from trainer.model.load_language_model import PRECISIONS, load_with_whole, refuse_no_language_model
from trainer.model.model import Reconstruction, WorldModel
from trainer.model.pretrained import pretrained_name
from trainer.model.projector_file import ProjectorConfig, ReadBy, TextRule, TrainedProjector, Training, library_versions
from trainer.model.towers import (
    describe_by_tower,
    describe_form,
    describe_tower_samples,
    make_projectors,
    refuse_unread,
    tower_record,
    tower_seed,
)
from trainer.run.checkpoint import CACHE_IDENTITY, LANGUAGE_MODEL, MustMatch, restore_projectors
from trainer.run.parallel import World
from trainer.run.sharded import load_sharded
from trainer.text.store import TEXT_VERSION, Split, TextStore, make_text, text_folder
from trainer.text.tokenizer import load_chat_tokenizer

CALIBRATION_SAMPLES = 64

FETCHING_THREADS = 3
"""Batches read from an object store at the same time: one at a time leaves the network idle more than half the time."""


class Session:
    """Caches, language model and projectors of a run; after `prepare`, also its text, split, model and loader."""

    text: TextStore
    split: Split
    model: WorldModel
    loader: StepLoader
    started_from: str | None = None
    """SHA-256 of the projector file that a new run starts from; None: random weights."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        """Open and check all that needs no text: tokenising takes minutes."""
        self.config, self.world = config, world
        self.cache = open_sound_caches(config, world)
        refuse_unread(config.model, self.cache)
        self.draw = draws_latents(config, self.cache)
        """Whether training draws latents from posterior moments."""
        name, most_tokens = config.model.language_model, config.data.max_text_tokens
        refuse_no_language_model(name)
        self.chat = load_chat_tokenizer(name, config.model.chat_template, most_tokens)
        self.text_folder = text_folder(self.cache, self.chat, config.text_dir)
        for path in config.all_caches:
            refuse_inside("data.text_dir", self.text_folder, path)
        dtype = PRECISIONS[config.run.precision]
        loaded = load_sharded(name, dtype, world) if self.in_step else load_with_whole(name, dtype, world.device)
        self.language, self.whole = loaded
        """The frozen text model, and transformers' model around it, which can generate."""
        self.projectors = make_projectors(config.model, self.cache.caches, self.language, config.data.seed)
        self.refuse_too_long()
        if config.run.attention != "auto":
            block = self.projectors.blocks(most_tokens, int(self.chat.begins_with_bos))
            block_1T = None if block is None else torch.tensor([block], device=world.device)
            choose_attention(self.language, config.run.attention, self.projectors.num_tokens + most_tokens, block_1T)
        self.projector_config = self.describe_projectors()
        self.must_match = self.what_must_match()
        if config.run.gradient_checkpointing != "none":
            self.language.checkpoint_layers(config.run.gradient_checkpointing)
        if config.run.compile != "none":
            self.language.compile_decoder(config.run.compile)

    def prepare(
        self,
        source: LatentSource | None = None,
        trained: Path | None = None,
        start: TrainedProjector | None = None,
    ) -> "Session":
        """Tokenise the text if no earlier run has, and set up the model; `source` is read in place of the cache.

        `trained` is a checkpoint to evaluate: then no training samples are needed. A new run starts with the weights of
        `start`, or with random ones if that is None.
        """
        self.world.on_main(lambda: make_text(self.text_folder, self.cache, self.chat))
        self.text = TextStore(self.text_folder)
        self.split = self.make_split(to_train=trained is None)
        self.loader = self.make_loader(self.world, source, to_train=trained is None)
        if trained is not None:
            restore_projectors(trained, self.projectors)
        else:
            self.initialise_projectors(start)
        self.world.broadcast_parameters(self.projectors.to(self.world.device))
        self.model = WorldModel(
            self.language,
            self.projectors,
            begins_with_bos=self.chat.begins_with_bos,
            loss_chunk=self.config.run.loss_chunk,
            reconstruction=None if trained is not None else self.make_reconstruction(),
        )
        self.started_from = None if start is None else start.sha256
        return self

    @property
    def in_step(self) -> bool:
        """Whether ranks share the language model and must run it together."""
        return self.world.size > 1 and self.config.run.parallel == "fsdp2"

    def stop_check(self, stopped: Callable[[], bool]) -> Callable[[], bool]:
        return (lambda: self.world.any(stopped())) if self.in_step else stopped

    # Before the text is known.

    def refuse_too_long(self) -> None:
        tokens, most, known = self.projectors.num_tokens, self.config.data.max_text_tokens, self.language.max_tokens
        if known is not None and tokens + most > known:
            left = known - tokens
            shorter = f"set data.max_text_tokens to {left} or less, or " if left > 1 else ""
            raise ConfigError(
                f"{tokens} world tokens and data.max_text_tokens {most} make {tokens + most}; "
                f"{self.config.model.language_model} knows {known} positions: {shorter}"
                "take another model.layout or model"
            )

    def describe_projectors(self) -> ProjectorConfig:
        model, chat = self.config.model, self.chat
        records = (tower_record(model, name, self.cache.caches[name], each) for name, each in self.projectors.items())
        found = pretrained_name(model.language_model)
        return ProjectorConfig(
            format_version=FORMAT_VERSION,
            towers=tuple(records),
            language_model=ReadBy(
                name=str(Path(found).absolute()) if Path(found).is_dir() else found,
                identity=self.language.identity(),
                width=self.language.width,
                precision=self.config.run.precision,
                opened_by=self.language.opened_by,
            ),
            text=TextRule(
                begins_with_bos=chat.begins_with_bos,
                chat_template=chat.template,
                content_in_parts=chat.has_content_parts,
                end_of_turn=chat.end_of_turn(),
            ),
            training=Training(steps=0, samples=0, val_fraction=self.config.data.val_fraction),
            versions=library_versions(),
        )

    def what_must_match(self) -> MustMatch:
        """Return the settings that decide the global batches and the shape and meaning of the projectors."""
        data, described = self.config.data, self.projector_config
        language_model = {LANGUAGE_MODEL: described.language_model.identity}
        return MustMatch(
            towers=tuple(self.projectors.names),
            caches={
                CACHE_IDENTITY: self.cache.identity,
                "texts of the samples": self.cache.texts_digest,
                "data.val_fraction": str(data.val_fraction),
            },
            samples=describe_by_tower(described.towers, describe_tower_samples),
            model=describe_by_tower(described.towers, describe_form) | language_model,
            text={**self.chat.facts, "text version": str(TEXT_VERSION)},
            order={
                "data.batch_size": str(data.batch_size),
                "data.seed": str(data.seed),
                "data.posterior": "sample" if self.draw else "mean",
                "data.shuffle_block": str(data.shuffle_block),
                "data.where": data.where or "",
            },
        )

    # Once the text is known.

    def make_split(self, *, to_train: bool) -> Split:
        config, largest, embedded = self.config, self.text.meta.largest_token, self.language.num_embeddings
        if largest >= embedded:
            raise ModelError(
                f"model.language_model {config.model.language_model}: its tokenizer gives token {largest}, and the "
                f"model embeds {embedded} tokens; the two do not belong together"
            )
        split, where = self.text.split(config.data.val_fraction), config.data.where
        if where is not None:
            if not len(numbers := self.cache.where(where)):
                raise ConfigError(f"data.where {where!r} matches none of the {len(self.cache):,} samples")
            split = split.among(numbers)
        if to_train and not len(split.train):
            caches = " and ".join(config.towers.values()) + (f" where {where}" if where else "")
            raise CacheError(
                f"{caches} leaves no sample to train on: {split.unlabelled:,} have no assistant's words within "
                f"data.max_text_tokens {config.data.max_text_tokens}, {len(split.validation):,} are held out; raise "
                f"it, or lower data.val_fraction {config.data.val_fraction}"
            )
        trained_on = f"{len(split.train):,} to train on, " if to_train else ""
        left_out = f", {split.unlabelled:,} skipped: no assistant's words" if split.unlabelled else ""
        too_few = ": too few to validate" if to_train and len(split.validation) == 1 else ""
        self.world.say(f"samples: {trained_on}{len(split.validation):,} held out{too_few}{left_out}")
        return split

    def make_loader(self, world: World, source: LatentSource | None = None, *, to_train: bool = True) -> StepLoader:
        """Make a rank's loader; evaluation takes no steps."""
        data, run, train = self.config.data, self.config.run, self.split.train
        stream = LatentStream(
            self.cache,
            data.batch_size,
            samples=train if to_train else None,
            seed=data.seed,
            epochs=None,
            rank=world.rank if to_train else 0,
            world_size=world.size if to_train else 1,
            shuffle_block=data.shuffle_block,
            draw=self.draw,
            source=source,
        )
        return StepLoader(
            stream=stream,
            text=self.text,
            accumulate=data.accumulate,
            ahead=stream.read_ahead(data.batch_size * run.total_steps(len(train), data.batch_size)),
            threads=FETCHING_THREADS if any(map(is_url, self.config.all_caches)) else 1,
            pin=world.device.type == "cuda",
            planned=self.text.planned_lengths() if run.compile == "layers" else (),
        )

    def initialise_projectors(self, start: TrainedProjector | None) -> None:
        """Copy the weights that `start` has, and scale the other towers to the token embeddings."""
        trained = dict(start.items()) if start is not None else {}
        for name, each in trained.items():
            self.projectors[name].load_state_dict(each.state_dict())
        if new := [name for name in self.projectors.names if name not in trained]:
            stream, target = self.loader.stream, self.language.embedding_rms()
            sizes = stream.sizes.indices(self.split.train)
            alike = self.split.train[sizes == sizes[0]]
            samples = stream.source.read(alike[:: -(-len(alike) // CALIBRATION_SAMPLES)])
            for name in new:
                self.projectors[name].match_rms(as_tensor(samples[name]), target)

    def make_reconstruction(self) -> Reconstruction | None:
        """Make the heads of the auxiliary loss, if the config gives it weight; ConfigError if no tower has a latent."""
        config = self.config.optim.reconstruction
        if not config.weight:
            return None
        before, seed = int(self.chat.begins_with_bos), tower_seed("reconstruction", self.config.data.seed)
        made = Reconstruction(self.projectors, self.language.width, config.kind, before, seed)
        if not made.heads:
            raise ConfigError(
                "optim.reconstruction.weight: no tower has a latent to predict: pretrained projectors read hidden "
                "states, and frozen ones learn nothing; set it to 0"
            )
        self.world.broadcast_parameters(made.to(self.world.device))
        return made


def open_sound_caches(config: TrainConfig, world: World) -> JoinedCache:

    def open_sound(path: str) -> Cache:
        cache = open_cache(path, cache_dir=config.data.cache_dir, cache_bytes=config.data.cache_bytes)
        world.on_main(lambda: verify(path, level="quick").raise_if_damaged())
        return cache

    views = [{name: open_sound(path) for name, path in view.items()} for view in config.views]
    return open_caches(views if len(views) > 1 else views[0])


def draws_latents(config: TrainConfig, cache: JoinedCache) -> bool:
    """Return whether training draws latents. ConfigError if `sample` is asked for and no tower has moments."""
    if config.data.posterior == "sample" and not has_moments(cache):
        raise ConfigError(
            f"data.posterior: sample needs posterior moments, and {cache.first.store} holds none: leave it out, or "
            "build a cache of them with `precompute build … --encoder.posterior moments`"
        )
    return config.data.posterior != "mean" and has_moments(cache)
