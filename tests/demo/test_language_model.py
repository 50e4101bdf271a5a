"""The language model learns from captions, and from nothing that they do not tell."""

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM

from demo.language_model import GROUND_WORD, Caption, make_language_model, train_on_text, write_notes

CAPTION = Caption(("red", "ring"), ("blue", "cross"), "left of")


def test_notes_hold_the_captions_words_and_nothing_else():
    cells, weights = write_notes(CAPTION, np.random.default_rng(0))
    assert {word for cell in cells for word in cell} == {GROUND_WORD, " red", " ring", " blue", " cross"}
    assert np.linalg.norm(weights, axis=1) == pytest.approx(1.0)


def test_notes_keep_the_relation():
    for seed in range(20):
        cells, _ = write_notes(CAPTION, np.random.default_rng(seed))
        grid = np.array([cell[1] for cell in cells]).reshape(8, 8)
        first, second = (np.argwhere(grid == word)[:, 1] for word in (" red", " blue"))
        assert first.mean() + 2 < second.mean()


def test_training_on_text_lowers_the_loss_and_repeats_exactly(school):
    def train(steps: int) -> tuple[float, Gemma3ForCausalLM]:
        model = make_language_model(school.tokenizer, seed=0)
        return train_on_text(model, school.tokenizer, school.lessons[:60], steps, seed=0), model

    first_loss, _ = train(1)
    loss, model = train(12)
    again, other = train(12)
    assert loss == again < first_loss - 0.5
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in model.state_dict().items())
