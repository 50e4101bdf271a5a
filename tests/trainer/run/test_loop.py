"""A run from its first step to its last: it learns, validates, logs every step, however it was stopped."""

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cache_store import JoinedCache, open_cache
from cache_store.errors import EncodeOnceError
from cache_store.format.array import Size
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.registry import load_encoder
from precompute.images.config import ImageConfig
from precompute.images.decode import decode_image
from precompute.images.fit import fit_image, placement_of
from tests.forked import FORKED
from tests.make_cache import caption, make_cache
from tests.named import assert_names
from tests.precompute.conftest import image_bytes, make_vae, run_build, write_source
from tests.trainer.conftest import MakeConfig
from tests.trainer.runs import (
    assert_same_run,
    fork_ranks,
    make_loop,
    metrics,
    open_alone,
    train_alone,
    train_until,
    watched,
)
from trainer.config import TrainConfig
from trainer.run.folder import checkpoints_of
from trainer.run.memory import fit_memory
from trainer.run.validation import Scores, make_shuffle_test, shuffle_test
from trainer.text.store import Split


@pytest.fixture(scope="module")
def uninterrupted(configured_here: MakeConfig) -> TrainConfig:
    return train_alone(configured_here("uninterrupted"))


def test_a_run_lowers_its_loss_and_logs_every_step(uninterrupted):
    folder = uninterrupted.run.folder
    losses = metrics(folder)
    assert list(losses) == list(range(1, 13))
    assert sum(losses[step] for step in (10, 11, 12)) < sum(losses[step] for step in (1, 2, 3)) - 0.1
    for key in ("loss", "loss_shuffled", "standard_error", "accuracy", "accuracy_shuffled"):
        assert list(metrics(folder, f"val_{key}")) == [5, 10, 12]
    for key in ("grad_norm", "lr", "samples_per_s", "tokens_per_s", "data_wait_share", "peak_memory_bytes"):
        assert [step for step, value in metrics(folder, key).items() if value > 0] == list(losses)


@pytest.mark.parametrize("stops", [(4, 5), (3, 10), *[(read,) for read in (6, 7, 8, 17, 18)]], ids=str)
def test_a_run_stopped_twice_is_the_run_never_stopped(configured_here, uninterrupted, stops):
    """Or once; around the steps with a validation, the 5th, 10th and last, and within validations."""
    config = configured_here(f"stopped-{stops}")
    for stop in stops:
        train_until(config, stop)
    assert_same_run(train_alone(config), uninterrupted)


def test_a_step_whose_loss_is_not_finite_is_named_and_redone(configured_here, uninterrupted):
    """Steps after the last checkpoint run again."""
    config = configured_here("not-finite")

    def spoil(read: int, latents: np.ndarray) -> None:
        if read == 12:
            latents[0] = np.nan

    with pytest.raises(EncodeOnceError, match=r"step 9 .*nan.*step 5.*\n  samples  sample-0000"):
        train_alone(config, watched(config, spoil))
    assert list(metrics(config.run.folder)) == [*range(1, 10)]
    assert metrics(config.run.folder, "nonfinite")[9].items() >= {"loss": "nan", "grad_norm": "nan"}.items()
    assert_same_run(train_alone(config), uninterrupted)


def test_steps_that_are_not_finite_are_skipped_if_the_config_says_so(configured_here):
    """One skipped step leaves the projector as it was and logs its samples; ten in a row stop the run, for a rerun."""
    once, always = (
        configured_here(name, nonfinite="skip", val_fraction=0.0, max_steps=12) for name in ("once", "always")
    )

    def spoil(first: int, last: int) -> Callable[[int, np.ndarray], None]:
        return lambda read, latents: latents.fill(np.nan) if first <= read <= last else None

    train_alone(once, watched(once, spoil(5, 5)))
    assert list(metrics(once.run.folder, "nonfinite")) == [4]
    assert_names(metrics(once.run.folder, "alerts")[4][0], "skipped: sample-")
    assert list(metrics(once.run.folder, "param_norm")) == [1, 2, 3, *range(5, 13)]
    with pytest.raises(EncodeOnceError, match="step 11.* 10 "):
        train_alone(always, watched(always, spoil(3, 99)))
    assert checkpoints_of(always.run).steps()[-1] == 11
    train_alone(always)
    assert list(metrics(always.run.folder, "param_norm")) == [1, 12]


CAPTIONING_IN_STEP = {"parallel": "fsdp2", "sample_captions": 8, "eval_every": 1}
"""Nearly all time goes into validation and captions, which no rank may leave alone."""


@pytest.mark.parametrize("changes", [{}, CAPTIONING_IN_STEP], ids=["ddp", "fsdp2"])
def test_a_signal_to_any_rank_stops_all_after_the_same_step(configured_here, changes):
    config = configured_here(f"signalled-{len(changes)}", max_steps=100_000, **changes)
    log, ranks = config.run.folder / "metrics.jsonl", fork_ranks(config)
    ranks[0].until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 3)
    ranks[1].send_signal(signal.SIGTERM)
    for code, errors in [rank.end() for rank in ranks]:
        assert code == 3, errors
        assert "trainer: stopped: after step" in errors
    assert checkpoints_of(config.run).steps()[-1] == max(metrics(config.run.folder))


def test_cached_training_is_training_with_a_live_encoder(configured, tmp_path):
    vae, source = make_vae(tmp_path), write_source(tmp_path / "source")
    cache = run_build(tmp_path, source, vae, store__dtype="float32", encoder__batch_size=1)
    recipe, size = ImageConfig(height=32, width=40).recipe, Size(1, 32, 40)
    encoder = load_encoder(EncoderConfig(model=str(vae), compute_dtype="float32", device="cpu"), recipe)

    def encode(number: int) -> np.ndarray:
        image = decode_image(image_bytes(number), recipe, size)
        pixels_YX3 = np.array(fit_image(image, recipe, placement_of(image.size, recipe, size)))
        return encoder.encode(torch.from_numpy(pixels_YX3)[None, None])[0].numpy()

    def read(numbers: np.ndarray) -> np.ndarray:
        return np.stack([encode(row) for row in open_cache(cache).samples(numbers, ["row"])["row"].to_pylist()])

    cached, live = (configured(name, cache=cache, epochs=3.5) for name in ("cached", "live"))
    train_alone(live, SimpleNamespace(read=lambda numbers: {"world": read(numbers)}))
    assert_same_run(train_alone(cached), live)
    assert len(metrics(cached.run.folder)) == 6


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"gradient_checkpointing": "full"}, 0),
        ({"gradient_checkpointing": "selective"}, 0),
        ({"accumulate": 4}, 1e-4),
        ({"loss_chunk": 5}, 1e-5),
        ({"precision": "bf16"}, 0.02),
    ],
    ids=str,
)
def test_a_switch_that_saves_memory_changes_no_loss(configured_here, uninterrupted, changes, tolerance):
    config = train_alone(configured_here("-".join(changes), **changes))
    assert metrics(config.run.folder) == pytest.approx(metrics(uninterrupted.run.folder), rel=tolerance, abs=0)


def fit_in_little_memory(config: TrainConfig, found: Path) -> None:
    """Fit the passes into half a gigabyte more than this process has."""
    session = open_alone(config)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + 500 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    fit_memory(session)
    found.write_text(str(session.loader.accumulate))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can limit a process's memory")
def test_as_few_passes_are_made_as_fit_into_memory(configured, tmp_path):
    """A pass over 4,096 samples keeps 0.9 GB, 0.2 MB a sample."""
    config, found = configured(batch_size=4_096, max_steps=1, val_fraction=0.0, fit_memory=True), tmp_path / "passes"
    process = FORKED.Process(target=fit_in_little_memory, args=(config, found), daemon=True)
    process.start()
    process.join(120)
    assert found.read_text() in ("2", "4", "8")


def test_a_run_where_an_expression_is_true_uses_only_such_samples(configured_here, refusal):
    def chosen(where: str | None) -> tuple[Split, JoinedCache]:
        session = open_alone(configured_here("chosen", where=where, max_steps=2))
        return session.split, session.cache

    (whole, cache), (some, _) = chosen(None), chosen("row < 30")
    rows = {name: cache.samples(vars(whole)[name], ["row"])["row"].to_numpy() for name in ("train", "validation")}
    for name, rows_N in rows.items():
        np.testing.assert_array_equal(vars(some)[name], vars(whole)[name][rows_N < 30])
    assert 0 < len(some.train) < len(whole.train)
    train_alone(configured_here("chosen", where="row < 30", max_steps=1))
    assert_names(refusal(1, configured_here("chosen", max_steps=2)), "data.where")
    assert_names(refusal(2, configured_here("none", where="row < 0")), "data.where 'row < 0' matches none")


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
