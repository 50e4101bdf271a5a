"""How many colour and shape words does the trained model get right on held-out scenes, and how many blindly?

Each word is predicted after the true words before it. Blind means with the latents of another scene, so the answer
can only be guessed: one in eight colours, one in five shapes.
"""
# Axes: N samples, L label tokens, V vocabulary.

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo.scenes import COLOURS, SHAPES
from trainer.config import TrainConfig
from trainer.model.model import ModelInput
from trainer.run.checkpoint import load_projector
from trainer.run.inputs import open_inputs
from trainer.run.parallel import join_world
from trainer.run.session import Session, open_session
from trainer.text.chat import load_chat_tokenizer

KINDS = {"colour": tuple(COLOURS), "shape": tuple(SHAPES)}


@dataclass(frozen=True, kw_only=True)
class WordAccuracy:
    """Shares of one kind of word that were right."""

    words: int
    own: float
    blind: float
    choices: int
    """How many such words there are: a guess is right once in so many."""


def word_accuracy(config: TrainConfig) -> dict[str, WordAccuracy]:
    """By kind of word, on the validation split, with the projector that the run at `config.run.output` trained."""
    with join_world() as world:
        session = open_session(open_inputs(config, world))
        load_projector(Path(config.run.output), session.model.projector)
        held_out = session.split.validation
        target_L, own_L = concatenated(predictions(session, held_out))
        _, blind_L = concatenated(predictions(session, np.roll(held_out, -1)))
    tokens = {kind: token_ids(config, words) for kind, words in KINDS.items()}
    return {kind: accuracy(torch.isin(target_L, tokens[kind]), own_L, blind_L, len(KINDS[kind])) for kind in KINDS}


def accuracy(is_kind_L: Tensor, own_L: Tensor, blind_L: Tensor, choices: int) -> WordAccuracy:
    return WordAccuracy(
        words=int(is_kind_L.sum()),
        own=float(own_L[is_kind_L].float().mean()),
        blind=float(blind_L[is_kind_L].float().mean()),
        choices=choices,
    )


def token_ids(config: TrainConfig, words: tuple[str, ...]) -> Tensor:
    """The token of each word where it follows a space, as it does in every answer."""
    chat = load_chat_tokenizer(config.model.language_model, config.model.chat_template, config.data.max_text_tokens)
    return torch.tensor(chat.tokenizer.convert_tokens_to_ids([f" {word}" for word in words]))


def predictions(session: Session, latents_of: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of target tokens, and whether the likeliest token is the target: both [L]."""
    held_out, size = session.split.validation, session.config.run.eval_batch_size
    for start in range(0, len(held_out), size):
        part = slice(start, start + size)
        batch = session.loader.load(held_out[part], latents_of[part]).to(session.world.device)
        yield batch.target_L.cpu(), (likeliest(session, batch) == batch.target_L).cpu()


@torch.no_grad()
def likeliest(session: Session, batch: ModelInput) -> Tensor:
    """The token that the model would say at each label's place: [L]."""
    model = session.model
    hidden_NTD = model.language.hidden(model.sequence(batch.latents_NCHW, batch.tokens_NT))
    predicting_L = batch.column_L + model.projector.num_tokens - 1
    logits_LV: Tensor = model.language.logits(hidden_NTD[batch.sample_L, predicting_L])
    return logits_LV.argmax(1)


def concatenated(batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    targets, right = zip(*batches, strict=True)
    return torch.cat(targets), torch.cat(right)
