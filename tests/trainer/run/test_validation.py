from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cache_store.errors import EncodeOnceError
from tests.make_cache import caption, make_cache
from tests.trainer.runs import make_loop, open_alone
from trainer.run.parallel import World
from trainer.run.validation import make_shuffle_test, rank_parts, sample_losses, shuffle_test, validation_loss


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


def test_a_difference_within_the_noise_is_not_claimed():
    rng = np.random.default_rng(0)
    own, tokens = rng.uniform(1, 2, 50), np.full(50, 4)
    noise = rng.standard_normal(50)
    for shift, verdict in ((0, "no sign"), (2, "the model uses"), (-2, "the image misleads")):
        assert make_shuffle_test(own, own + noise - noise.mean() + shift, tokens).verdict.startswith(verdict)
    clear = make_shuffle_test(own, own + 1, tokens)
    assert clear.difference == pytest.approx(0.25)
    assert clear.standard_error == pytest.approx(0, abs=1e-12)


def test_each_sample_has_its_own_loss_and_a_stopped_test_none(configured):
    sessions = [open_alone(configured(eval_batch_size=size)) for size in (1, 3, 8)]
    losses = [sample_losses(session, session.split.validation) for session in sessions]
    assert len(losses[0]) == len(sessions[0].split.validation)
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-4)
    assert shuffle_test(sessions[0], stopped=lambda: True) is None


def test_a_loss_that_is_not_finite_names_its_sample(configured):
    session = open_alone(configured())
    spoilt = session.split.validation[1]

    def read(numbers: np.ndarray) -> np.ndarray:
        return np.where((numbers == spoilt)[:, None, None, None], np.nan, session.cache.read(numbers))

    loader = replace(session.loader, source=SimpleNamespace(read=read))
    (name,) = session.cache.samples(np.array([spoilt]), ["id"])["id"].to_pylist()
    for judge in (shuffle_test, validation_loss):
        with pytest.raises(EncodeOnceError, match=rf"loss of 1 of \d held-out samples[^§]*samples  {name}\n"):
            judge(replace(session, loader=loader))


@pytest.mark.parametrize(("count", "size", "batch_size"), [(7, 1, 3), (7, 2, 2), (7, 4, 8), (1, 3, 8)])
def test_ranks_share_the_samples_without_gap_or_overlap(count, size, batch_size):
    worlds = [World(rank=rank, size=size, device=torch.device("cpu")) for rank in range(size)]
    parts = [range(part.start, part.stop) for world in worlds for part in rank_parts(count, batch_size, world)]
    assert [index for part in parts for index in part] == list(range(count))
    assert max(map(len, parts)) <= batch_size
