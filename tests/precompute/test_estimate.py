"""`precompute estimate` on a small source: its figures and refusals; it writes nothing."""

import re
from collections import Counter
from math import inf
from types import SimpleNamespace

import pytest

from cache_store.storage.local import LocalStore
from precompute.cli import main
from precompute.config import EstimateConfig
from precompute.encoders.encoder_config import EncoderConfig
from precompute.estimate import KEPT_RUNS, RUN_SAMPLES, Measured, draw, seconds_of_training, training_row
from precompute.images.config import ImageConfig
from precompute.sources.config import SourceConfig
from tests.precompute.conftest import SAMPLES

FAST = {"encoding": 0.001, "decoding": 0.0001}
"""Seconds of a sample if decoding is fast."""
STARVED = {"encoding": 0.001, "decoding": 0.002}


BUILD = {
    "cache": "cache",
    "source": SourceConfig(kind="folder", path="images"),
    "encoder": EncoderConfig(model="model"),
    "image": ImageConfig(height=32, width=32),
}


def measured(busy_s, codec="none"):
    spec = SimpleNamespace(rows=3_600_000, array=SimpleNamespace(codec=codec))
    common = {"encoded": 1, "rejected": Counter(), "device": "cpu", "threads": 1, "free": None}
    sizes = {"none": 25_000.0, "zstd": 12_500.0}
    return Measured(spec=spec, busy_s=busy_s, sample_s=max(busy_s.values()), stored_bytes=sizes, **common)


@pytest.mark.parametrize(
    ("busy_s", "training_s", "settings", "live_s", "cached_s", "paid"),
    [
        pytest.param(FAST, 0.003, {}, 0.004, 0.003, "1.0", id="encoding takes turns with the step: paid in one epoch"),
        pytest.param(FAST, 1e-9, {}, 0.001, 0.000025, "1.0", id="reading takes its time, too"),
        pytest.param(STARVED, 0.0005, {}, 0.002, 0.0005, "1.3", id="decoding sets the pace of short steps"),
        pytest.param(FAST, 0.001, {"read_mb_per_s": 10.0}, 0.002, 0.0025, "never", id="never: slower to read"),
    ],
)
def test_a_cache_pays_off_once_it_has_saved_its_build(busy_s, training_s, settings, live_s, cached_s, paid):
    asked = {"read_mb_per_s": 1_000.0, "dollars_per_gpu_hour": 2.0, **settings}
    config, found = EstimateConfig(**BUILD, **asked), measured(busy_s)
    assert seconds_of_training(config, found, 1 / training_s) == pytest.approx((live_s, cached_s))
    epochs = inf if paid == "never" else found.sample_s / (live_s - cached_s) / config.gpus
    for shares, sign in ((0.5, "lost: "), (2.0, "")):
        config = EstimateConfig(**BUILD, epochs=min(epochs, 100) * shares, **asked)
        *_, shown, saved = training_row(config, found, 1 / training_s)
        assert shown == (paid if paid == "never" else f"{paid} epochs")
        assert saved.startswith("lost: " if paid == "never" else sign)
    if busy_s is FAST and training_s == 0.003:
        assert saved == "1.0 h of GPUs, $2.00"


def test_an_estimate_says_what_a_build_takes_and_writes_nothing(project):
    files = sorted(project.folder.rglob("*"))
    asked = ["--seconds", 0.01, "--epochs", 3, "--dollars-per-gpu-hour", 2]
    said = project.run(main, "estimate", "--config", project.config(), *asked)
    assert sorted({*project.folder.rglob("*")} - {*files}) == [project.folder / "cache.yaml"]
    for line in (rf"{SAMPLES} samples", "rejected among", r"decoding .* images/s", r"\$.* a million images"):
        assert re.search(line, said), said
    sizes = dict(re.findall(r"^(none|lz4|zstd).* {2}([\d,]+) ", said, re.MULTILINE))
    assert sizes.keys() == {"none", "lz4", "zstd"}
    assert sizes["none"] == str(16 * 4 * 5 * 2 + 4)
    assert len(re.findall(r" epochs +.* of GPUs, \$", said)) == 3


@pytest.mark.parametrize(("free", "said", "code"), [(11_000, "11.0 KB: too little", 1), (None, "unknown", 0)])
def test_a_cache_that_would_not_fit_fails(project, monkeypatch, free, said, code):
    monkeypatch.setattr(LocalStore, "free_bytes", lambda store: free)
    asked = "estimate", "--config", project.config(), "--seconds", 0.01
    assert f"free at {project.cache}: {said}\n" in project.run(main, *asked, code=code)


def test_every_run_of_a_list_is_drawn_as_often():
    listed = [{"id": number} for number in range((KEPT_RUNS + 2) * RUN_SAMPLES)]
    drawn = [draw(listed, 8, seed) for seed in range(200)]
    assert {count for count, _ in drawn} == {len(listed)}
    kept = [[sample["id"] for sample in samples[::RUN_SAMPLES]] for _, samples in drawn]
    assert {len(each) for each in kept} == {KEPT_RUNS}
    often = Counter(run for each in kept for run in each)
    assert len(often) == KEPT_RUNS + 2
    assert min(often.values()) > 200 * KEPT_RUNS / (KEPT_RUNS + 2) - 30
    assert max(Counter(each[0] for each in kept).values()) < 20, "and in any order"
