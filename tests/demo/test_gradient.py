"""How large the projector's first gradient is, on the demo's small language model.

A frozen decoder normalises what enters, so the gradient is as many times larger as the world tokens are smaller than
the embeddings that it knows. Matching makes that a choice.
"""

import numpy as np
import pytest
import torch

from demo.language_model import make_language_model
from trainer.data.batches import model_input
from trainer.model.language_model import LanguageModel
from trainer.model.model import WorldModel
from trainer.model.projector import LAYOUTS, SHAPES, Projector
from trainer.text.store import TextBatch


@pytest.fixture(scope="module")
def gradient_of(school):
    """The norm at the start of a run whose world tokens are `size` times as large as embeddings."""
    gemma = make_language_model(school.tokenizer, seed=0)
    language = LanguageModel(gemma.get_input_embeddings(), gemma.get_decoder(), gemma.lm_head, gemma.config)
    texts = [lesson.text for lesson in school.lessons[:8]]
    longest = max(len(text.tokens) for text in texts)
    tokens, is_label = (
        np.stack([np.pad(getattr(text, name), (0, longest - len(text.tokens))) for text in texts])
        for name in ("tokens", "is_label")
    )
    places = np.nonzero(is_label)
    latents = np.random.default_rng(0).standard_normal((len(texts), 16, 8, 8)).astype(np.float32)
    batch = model_input(latents, TextBatch(tokens.astype(np.int64), *places, tokens[places].astype(np.int64)))

    def norm(layout: str, shape: str, size: float) -> float:
        options = {"layout": layout, "shape": shape, "mean": [0.0] * 16, "std": [1.0] * 16, "seed": 0}
        projector = Projector(latent_shape=(16, 8, 8), width=language.width, **options)
        projector.match_rms(batch.latents_NCHW, size * language.embedding_rms())
        WorldModel(language, projector, begins_with_bos=True)(batch).mean().backward()
        return float(torch.nn.utils.get_total_norm([each.grad for each in projector.parameters()]))

    return norm


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_is_moderate_when_matched_else_scaled(gradient_of, layout, shape):
    moderate = gradient_of(layout, shape, 1.0)
    assert 0.5 < moderate < 5
    for size in (0.1, 0.01):
        assert gradient_of(layout, shape, size) / moderate == pytest.approx(1 / size, rel=0.2)
