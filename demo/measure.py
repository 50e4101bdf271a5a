"""Measure how many colour and shape words the trained model gets right on held-out scenes, and how many blindly.

Each word is predicted after the true words before it. Blind means with the latents of another scene, so that the model
can only guess: one in eight colours, one in five shapes.
"""
# Axes: N samples, L label tokens, V vocabulary.

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo.scenes import COLOURS, SHAPES
from trainer.config import TrainConfig
from trainer.run.checkpoint import restore_projectors
from trainer.run.parallel import join_world
from trainer.run.session import Session
from trainer.text.tokenizer import load_chat_tokenizer

KINDS = {"colour": tuple(COLOURS), "shape": tuple(SHAPES)}


@dataclass(frozen=True, kw_only=True)
class WordAccuracy:
    """Shares of one kind of word that were right."""

    words: int
    own: float
    blind: float
    choices: int
    """Number of words of this kind; a random guess is right once in this many."""


def word_accuracy(config: TrainConfig) -> dict[str, WordAccuracy]:
    """Measure each kind of word on the validation split, with the projector of the run at `config.run.output`."""
    with join_world() as world:
        session = Session(config, world).prepare()
        restore_projectors(Path(config.run.output), session.model.projectors)
        held_out = session.split.validation
        target_L, own_L = predictions(session, held_out)
        _, blind_L = predictions(session, np.roll(held_out, -1))
    accuracies = {}
    for kind, words in KINDS.items():
        is_kind_L = torch.isin(target_L, token_ids(config, words))
        own, blind = (float(right_L[is_kind_L].float().mean()) for right_L in (own_L, blind_L))
        accuracies[kind] = WordAccuracy(words=int(is_kind_L.sum()), own=own, blind=blind, choices=len(words))
    return accuracies


def token_ids(config: TrainConfig, words: tuple[str, ...]) -> Tensor:
    """Return the token of each word after a space, as in every answer."""
    chat = load_chat_tokenizer(config.model.language_model, config.model.chat_template, config.data.max_text_tokens)
    return torch.tensor(chat.tokenizer.convert_tokens_to_ids([f" {word}" for word in words]))


@torch.no_grad()
def predictions(session: Session, latents_of: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the target tokens, and whether the model predicts each of them: both [L]."""
    held_out, size, model = session.split.validation, session.config.run.eval_batch_size, session.model
    targets, right = list[Tensor](), list[Tensor]()
    for start in range(0, len(held_out), size):
        part = slice(start, start + size)
        batch = session.loader.load(held_out[part], latents_of[part]).to(session.world.device)
        hidden_NTD = model.hidden(batch.latents, batch.tokens_NT)
        predicting_L = batch.column_L + model.projectors.num_tokens - 1
        logits_LV = model.language.logits(hidden_NTD[batch.sample_L, predicting_L])
        targets.append(batch.target_L.cpu())
        right.append((logits_LV.argmax(1) == batch.target_L).cpu())
    return torch.cat(targets), torch.cat(right)
