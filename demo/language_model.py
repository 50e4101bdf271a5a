"""A small Gemma 3 text model, trained on text alone and then frozen.

Large language models can use the text before a question. This small one learns that from notes: the words of a caption
on a grid, where the scene might have them, each cell a random blend of the embeddings of its words. The captions are
those of the training part; no images are used, and no positions beyond those that a caption tells. Later the
projector's world tokens take the place of the notes, and it only has to learn to write latents in a language that the
model reads.

Blends matter: a model trained only on whole words reads a projected token as one word, and colours hide shapes.
"""
# Axes: N texts, T tokens, K cells of the notes, B words blended in a cell, D model width.

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

from cache_store.program.progress_bar import ProgressBar
from demo.scenes import Scene
from demo.tokenizer import NOTES_BEGIN, NOTES_END
from trainer.text.chat import TokenizedText

GRID = 8
"""Cells a side; as many as the latents have."""

GROUND_WORD = " scene"
WIDTH, LAYERS, HEADS = 96, 2, 4
BATCH = 16
PEAK_LR = 2e-3
WARMUP_STEPS = 30
NOT_LABEL = -100


@dataclass(frozen=True)
class Caption:
    """The facts in a scene's text: colour and shape of both things, and their relation."""

    first: tuple[str, str]
    second: tuple[str, str]
    relation: str

    @staticmethod
    def from_scene(scene: Scene) -> "Caption":
        first, second = scene.first, scene.second
        return Caption((first.colour, first.shape), (second.colour, second.shape), scene.relation)


@dataclass(frozen=True)
class Lesson:
    """A conversation, and the caption whose notes stand before it."""

    caption: Caption
    text: TokenizedText


@dataclass(frozen=True)
class LessonBatch:
    """Texts after their notes; `labels_NT` is NOT_LABEL at tokens that are not learned."""

    words_NKB: Tensor
    weights_NKB: Tensor
    tokens_NT: Tensor
    labels_NT: Tensor


def make_language_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Gemma3ForCausalLM:
    """Make the untrained model."""
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=WIDTH // HEADS,
        query_pre_attn_scalar=WIDTH // HEADS,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=512,
        layer_types=["full_attention"] * LAYERS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gemma3ForCausalLM(config)


def train_on_text(
    model: Gemma3ForCausalLM, tokenizer: PreTrainedTokenizerFast, lessons: Sequence[Lesson], steps: int, seed: int
) -> float:
    """Train the model to answer from notes; return the last step's loss."""
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_LR, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    ends = torch.tensor(tokenizer.convert_tokens_to_ids([NOTES_BEGIN, NOTES_END]))
    loss = torch.tensor(math.nan)
    with ProgressBar("text only", steps, "step") as bar:
        for batch in batches(tokenizer, lessons, steps, seed):
            loss = text_loss(model, batch, ends)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.update(note=f"loss {loss.item():.3f}")
    return loss.item()


def text_loss(model: Gemma3ForCausalLM, batch: LessonBatch, ends: Tensor) -> Tensor:
    """Compute the mean cross entropy of the label tokens."""
    embeddings_NTD = embed(model, batch, ends)
    hidden_NTD = model.model(inputs_embeds=embeddings_NTD, use_cache=False).last_hidden_state
    num_text = batch.tokens_NT.shape[1]
    predicting_NTD = hidden_NTD[:, -num_text:][:, :-1]
    targets_NT = batch.labels_NT[:, 1:]
    is_label_NT = targets_NT != NOT_LABEL
    return cross_entropy(model.lm_head(predicting_NTD[is_label_NT]), targets_NT[is_label_NT])


def embed(model: Gemma3ForCausalLM, batch: LessonBatch, ends: Tensor) -> Tensor:
    """Embed [BOS] [NOTES] blends [/NOTES] text, in the order that the trainer uses for world tokens."""
    look_up = model.get_input_embeddings()
    notes_NKD = (look_up(batch.words_NKB) * batch.weights_NKB[..., None]).sum(2)
    begin_N1D, end_N1D = look_up(ends).expand(len(notes_NKD), 2, -1).split(1, dim=1)
    text_NTD = look_up(batch.tokens_NT)
    return torch.cat([text_NTD[:, :1], begin_N1D, notes_NKD, end_N1D, text_NTD[:, 1:]], 1)


def batches(
    tokenizer: PreTrainedTokenizerFast, lessons: Sequence[Lesson], steps: int, seed: int
) -> Iterator[LessonBatch]:
    """Yield batches of random lessons, with new notes each time."""
    rng = np.random.default_rng(seed)
    ids = tokenizer.get_vocab()
    for _ in range(steps):
        chosen = [lessons[number] for number in rng.integers(len(lessons), size=BATCH)]
        notes = [write_notes(lesson.caption, rng) for lesson in chosen]
        words = np.array([[[ids[word] for word in cell] for cell in cells] for cells, _ in notes])
        texts = [lesson.text for lesson in chosen]
        labels = [np.where(text.is_label, text.tokens, NOT_LABEL) for text in texts]
        yield LessonBatch(
            words_NKB=torch.from_numpy(words),
            weights_NKB=torch.from_numpy(np.stack([weights for _, weights in notes])),
            tokens_NT=padded([text.tokens for text in texts], tokenizer.pad_token_id),
            labels_NT=padded(labels, NOT_LABEL),
        )


def padded(rows: list[np.ndarray], value: int) -> Tensor:
    return pad_sequence([torch.from_numpy(row).long() for row in rows], batch_first=True, padding_value=value)


def write_notes(caption: Caption, rng: np.random.Generator) -> tuple[list[tuple[str, str, str]], np.ndarray]:
    """Write a caption as a grid, row by row: three words per cell, and their weights [cells, 3] of unit norm.

    The colour and shape of each thing lie around a place that fits the relation; all other cells are ground.
    """
    words = np.full((GRID, GRID, 3), GROUND_WORD, dtype=object)
    weights = np.zeros((GRID, GRID, 3), np.float32)
    weights[..., 0] = 1.0
    rows, columns = np.mgrid[:GRID, :GRID] + 0.5
    for order, (colour, shape) in enumerate((caption.first, caption.second)):
        along, across = GRID * (0.25 + 0.5 * order) + rng.uniform(-0.4, 0.4), GRID * rng.uniform(0.27, 0.73)
        x, y = (along, across) if caption.relation == "left of" else (across, along)
        reach = rng.uniform(0.8, 1.9)
        inside = (abs(columns - x) <= reach) & (abs(rows - y) <= reach)
        words[inside] = (GROUND_WORD, f" {colour}", f" {shape}")
        weights[inside] = rng.uniform(size=(int(inside.sum()), 3))
    weights /= np.linalg.norm(weights, axis=-1, keepdims=True)
    return [tuple(cell) for cell in words.reshape(-1, 3)], weights.reshape(-1, 3)
