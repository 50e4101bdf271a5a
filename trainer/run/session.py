"""Prepare a run from its inputs: the cache's text, its split, and the model with its initial weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cache_store import CacheError
from cache_store.errors import ConfigError, ModelError
from cache_store.storage.store import is_url
from trainer.config import TrainConfig
from trainer.data.batches import StepLoader
from trainer.data.stream import LatentSource, LatentStream, as_tensor
from trainer.model.loss import Reconstruction
from trainer.model.model import WorldModel
from trainer.model.projector_file import TrainedProjector
from trainer.model.towers import tower_seed
from trainer.run.checkpoint import restore_projectors
from trainer.run.inputs import Inputs
from trainer.run.parallel import World
from trainer.text.store import Split, TextStore
from trainer.text.writer import make_text

CALIBRATION_SAMPLES = 64

FETCHING_THREADS = 3
"""Batches read from an object store at the same time. With answers that begin after 20 ms, reading one at a time left
processor and network idle for more than half the time.
"""


@dataclass(frozen=True, kw_only=True)
class Session(Inputs):
    """The inputs of a run, and its text, split, model and loader: training and evaluation share them."""

    text: TextStore
    split: Split
    model: WorldModel
    loader: StepLoader
    started_from: str | None
    """SHA-256 of the projector file that a new run starts from; None if it starts from random weights."""


def open_session(
    inputs: Inputs,
    source: LatentSource | None = None,
    trained: Path | None = None,
    start: TrainedProjector | None = None,
) -> Session:
    """Tokenise the text if no earlier run has, and set up the model; `source` is read in place of the cache.

    `trained` is a checkpoint to evaluate: then no training samples are needed. A new run starts with the weights of
    `start`, or with random ones if that is None.
    """
    text = open_text(inputs)
    refuse_unknown_tokens(inputs, text)
    split = text.split(inputs.config.data.val_fraction)
    if (where := inputs.config.data.where) is not None:
        if not len(numbers := inputs.cache.where(where)):
            raise ConfigError(f"data.where {where!r} matches none of the {len(inputs.cache):,} samples")
        split = split.among(numbers)
    if trained is None:
        refuse_none_to_train_on(split, inputs.config)
    announce_split(split, inputs.world, to_train=trained is None)
    loader = make_loader(inputs, text, split, source, to_train=trained is None)
    if trained is not None:
        restore_projectors(trained, inputs.projectors)
    else:
        initialise_projectors(inputs, loader, start)
    inputs.world.broadcast_parameters(inputs.projectors.to(inputs.world.device))
    begins_with_bos = text.meta.begins_with_bos
    model = WorldModel(
        inputs.language,
        inputs.projectors,
        begins_with_bos=begins_with_bos,
        loss_chunk=inputs.config.run.loss_chunk,
        reconstruction=None if trained is not None else make_reconstruction(inputs, begins_with_bos=begins_with_bos),
    )
    started_from = None if start is None else start.sha256
    return Session(**vars(inputs), text=text, split=split, model=model, loader=loader, started_from=started_from)


def open_text(inputs: Inputs) -> TextStore:
    """Open the cache's text; rank 0 tokenises it if no earlier run has."""
    folder, cache = inputs.text_folder, inputs.cache
    inputs.world.on_main(lambda: make_text(folder, cache, inputs.chat))
    return TextStore(folder)


def refuse_unknown_tokens(inputs: Inputs, text: TextStore) -> None:
    """Raise ModelError if the text has a token without an embedding in the model; unused tokens do no harm."""
    if text.meta.largest_token >= inputs.language.num_embeddings:
        raise ModelError(
            f"model.language_model {inputs.config.model.language_model}: its tokenizer gives token "
            f"{text.meta.largest_token}, and the model embeds {inputs.language.num_embeddings} tokens; the two do not "
            "belong together"
        )


def refuse_none_to_train_on(split: Split, config: TrainConfig) -> None:
    if not len(split.train):
        caches = " and ".join(config.towers.values()) + (f" where {config.data.where}" if config.data.where else "")
        raise CacheError(
            f"{caches} leaves no sample to train on: {split.unlabelled:,} have no assistant's words within "
            f"data.max_text_tokens {config.data.max_text_tokens}, {len(split.validation):,} are held out; raise it, "
            f"or lower data.val_fraction {config.data.val_fraction}"
        )


def announce_split(split: Split, world: World, *, to_train: bool) -> None:
    trained_on = f"{len(split.train):,} to train on, " if to_train else ""
    left_out = f", {split.unlabelled:,} skipped: no assistant's words" if split.unlabelled else ""
    too_few = ": too few to compare with another's image" if to_train and len(split.validation) == 1 else ""
    world.say(f"samples: {trained_on}{len(split.validation):,} held out{too_few}{left_out}")


def make_reconstruction(inputs: Inputs, *, begins_with_bos: bool) -> Reconstruction | None:
    """Make the heads of the auxiliary loss, if the config gives it weight; ConfigError if no tower has a latent."""
    config, language = inputs.config.optim.reconstruction, inputs.language
    if not config.weight:
        return None
    seed = tower_seed("reconstruction", inputs.config.data.seed)
    made = Reconstruction(inputs.projectors, language.width, config.kind, int(begins_with_bos), seed)
    if not made.heads:
        raise ConfigError(
            "optim.reconstruction.weight: no tower has a latent to predict: pretrained projectors read hidden states, "
            "and frozen ones learn nothing; set it to 0"
        )
    inputs.world.broadcast_parameters(made.to(inputs.world.device))
    return made


def make_loader(
    inputs: Inputs, text: TextStore, split: Split, source: LatentSource | None = None, *, to_train: bool = True
) -> StepLoader:
    """Make this rank's loader; evaluation, which takes no steps, may have any number of ranks."""
    data, run, world, train = inputs.config.data, inputs.config.run, inputs.world, split.train
    stream = LatentStream(
        inputs.cache,
        data.batch_size,
        samples=train if to_train else None,
        seed=data.seed,
        epochs=None,
        rank=world.rank if to_train else 0,
        world_size=world.size if to_train else 1,
        shuffle_block=data.shuffle_block,
        draw=inputs.draw,
        source=source,
    )
    return StepLoader(
        stream=stream,
        text=text,
        accumulate=data.accumulate,
        ahead=stream.read_ahead(data.batch_size * run.total_steps(len(train), data.batch_size)),
        threads=FETCHING_THREADS if any(map(is_url, inputs.config.all_caches)) else 1,
        pin=world.device.type == "cuda",
        planned=text.planned_lengths() if run.compile == "layers" else (),
    )


def initialise_projectors(inputs: Inputs, loader: StepLoader, start: TrainedProjector | None) -> None:
    """Copy the weights that `start` has into their towers, and scale the others' output to the token embeddings."""
    trained = dict(start.items()) if start is not None else {}
    for name, each in trained.items():
        inputs.projectors[name].load_state_dict(each.state_dict())
    if new := [name for name in inputs.projectors.names if name not in trained]:
        match_embeddings(inputs, loader, new)


def match_embeddings(inputs: Inputs, loader: StepLoader, towers: Sequence[str]) -> None:
    """Scale towers' output to the token embeddings, measured on a fixed draw of training samples."""
    stream = loader.stream
    samples = stream.source.read(stream.first_numbers(CALIBRATION_SAMPLES))
    target = inputs.language.embedding_rms()
    for name in towers:
        inputs.projectors[name].match_rms(as_tensor(samples[name]), target)
