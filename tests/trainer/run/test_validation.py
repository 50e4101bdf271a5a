"""Validation tells whether the projector uses the image, and names samples whose loss is not finite."""

from types import SimpleNamespace

import numpy as np
import pytest

from cache_store.errors import EncodeOnceError
from tests.make_cache import caption, make_cache
from tests.trainer.runs import make_loop, open_alone
from trainer.run.validation import Scores, make_shuffle_test, shuffle_test


def test_a_projector_that_learned_is_told_from_one_that_did_not(configured, tmp_path):
    rng = np.random.default_rng(0)
    kind = np.arange(60) % 3
    latents = 0.1 * rng.standard_normal((60, 4, 2, 2), np.float32) + kind[:, None, None, None] - 1
    words = [caption(("red", "green", "blue")[colour]) for colour in kind]
    cache = make_cache(tmp_path / "cache", latents.astype(np.float32), conversations=words, dtype="float32")
    session = open_alone(configured(cache=cache, lr=1e-2, epochs=20, eval_every=10_000))
    before = shuffle_test(session)
    make_loop(session).run()
    after = shuffle_test(session)
    assert before.verdict.startswith("no sign")
    assert after.verdict.startswith("the model uses the image")
    assert after.own < before.own
    assert after.own_accuracy > after.shuffled_accuracy


def test_a_difference_within_the_noise_is_not_claimed():
    rng = np.random.default_rng(0)
    own, tokens = rng.uniform(1, 2, 50), np.full(50, 4)
    noise = rng.standard_normal(50)
    for shift, verdict in ((0, "no sign"), (2, "the model uses"), (-2, "the image misleads")):
        shuffled = Scores(own + noise - noise.mean() + shift, tokens - 3, tokens)
        assert make_shuffle_test(Scores(own, tokens - 1, tokens), shuffled).verdict.startswith(verdict)
    clear = make_shuffle_test(Scores(own, tokens - 1, tokens), Scores(own + 1, tokens - 3, tokens))
    assert clear.difference == pytest.approx(0.25)
    assert (clear.own_accuracy, clear.shuffled_accuracy) == (0.75, 0.25)
    assert clear.standard_error == pytest.approx(0, abs=1e-12)


def test_a_loss_that_is_not_finite_names_its_sample(configured):
    session = open_alone(configured(eval_batch_size=3))
    spoilt = session.split.validation[4]

    def read(numbers: np.ndarray) -> dict[str, np.ndarray]:
        latents = session.cache.first.read(numbers)
        return {"world": np.where((numbers == spoilt)[:, None, None, None], np.nan, latents)}

    session.loader = session.make_loader(session.world, SimpleNamespace(read=read))
    (name,) = session.cache.samples(np.array([spoilt]), ["id"])["id"].to_pylist()
    with pytest.raises(EncodeOnceError, match=rf" 1 of \d [^§]*samples  {name}\n"):
        shuffle_test(session)
