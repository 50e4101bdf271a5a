"""Each benchmark at toy size prints a table, and one JSON record as its last line."""

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import (
    buckets,
    build,
    decode,
    encode,
    families,
    feed,
    forms,
    identities,
    loader,
    object_server,
    on_gpu,
    photographs,
    remote,
    scale,
    switches,
    train_step,
    verify,
)
from precompute.images.config import ImageConfig
from tests.precompute.conftest import make_vae
from tests.precompute.encoders.test_vaes import VAES

pytestmark = pytest.mark.slow

Measure = Callable[..., tuple[dict[str, Any], list[str]]]


@pytest.fixture
def measure(capsys: pytest.CaptureFixture[str]) -> Measure:
    """Run a benchmark that must succeed; return its record and the lines above it."""

    def run(benchmark: Any, *options: str) -> tuple[dict[str, Any], list[str]]:
        assert benchmark.main(options) == 0
        *table, last = capsys.readouterr().out.splitlines()
        return json.loads(last), table

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """The option that names a folder for what a benchmark writes, all of which it must remove."""
    yield f"--folder={tmp_path}"
    assert list(tmp_path.iterdir()) == []


SMALL = ["--height=16", "--width=24", "--batch-size=2", "--repeats=1"]
FEED = ["--samples=24", "--samples-per-shard=8", "--batch-size=4", "--height=32", "--width=40", "--count=5"]
FEED += ["--encoder-ms=2", "--repeats=1"]
TRAIN = ["--layers=1", "--vocabulary=64", "--samples=16", "--batch-size=2", "--height=32", "--width=32"]
TOY: list[tuple[Any, list[str], str, int]] = [
    (encode, [*SMALL, "--base-dim=8", "--device=cpu"], "images_per_s", 4),
    (build, [*SMALL, "--count=4", "--compute-dtype=float32"], "images_per_s", 3),
    (verify, ["--samples=12", "--samples-per-shard=4", "--quick-shards=3", "--repeats=1"], "gb_per_s", 21),
    (feed, [*FEED, "--decode=real", "--workers=2"], "images_per_s", 4),
    (feed, [*FEED, "--decode=video", "--frames=5"], "clips_per_s", 3),
    (scale, ["--hard", "--samples", "1100"], "results", 1),
    (buckets, ["--samples=5000", "--headers=20", "--count=5"], "results", 4),
    (train_step, [*TRAIN, "--widths=16", "--repeats=8"], "widths", 1),
    (switches, [*TRAIN, "--model-width=16", "--steps=10", "--pairs=loss_chunk"], "pairs", 1),
]
"""Benchmarks, their options, and the part of the record that has so many rivals."""


def test_forms_of_storage_have_errors_and_sizes(measure, tmp_path):
    latents = np.random.default_rng(0).normal(size=(3, 4, 6, 8)).astype(np.float16)
    np.save(tmp_path / "latents.npy", latents)
    record, _ = measure(forms, f"--latents={tmp_path}/latents.npy", "--repeats=1")
    errors = record["rounding"]
    assert 0 < errors["float16"] < errors["bfloat16"] < errors["uint8, a scale a channel"] < errors["float8_e4m3fn"]
    assert len(record["codecs"]) == 3
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)).save(tmp_path / "one.png")
    options = [f"--encoder={make_vae(tmp_path)}", "--height=32", "--width=40"]
    record, _ = measure(forms, *options, f"--images={tmp_path}")
    assert record["pictures"]["float32"]["dB to float32"]["median"] == forms.EQUAL


@pytest.fixture(autouse=True)
def scale_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure steps of `scale` here, but those at a store, not in a process that first imports all libraries."""
    in_process = scale.in_process

    def measured(step: str, bench: scale.Bench, env: dict[str, str] | None = None) -> dict[str, float]:
        return in_process(step, bench, env) if env else scale.measured(step, bench)

    monkeypatch.setattr(scale, "in_process", measured)


@pytest.mark.parametrize(("benchmark", "options", "part", "count"), TOY)
def test_a_benchmark_at_toy_size_has_a_figure_for_each_rival(measure, folder, benchmark, options, part, count):
    is_on_disk = benchmark in (build, verify, feed, scale)
    record, table = measure(benchmark, *options, *([folder] if is_on_disk else []))
    assert record.keys() >= {"command", "revision", "environment", "versions", "hardware", "settings"}
    assert len(record[part]) == count
    assert len(table) > 1
    for figures in (*record[part].values(), *record.get("ratios", {}).values()):
        assert "median" not in figures or 0 < figures["min"] <= figures["median"] <= figures["max"]


def test_decode_measures_speed_over_pillow_and_differences(measure, tmp_path):
    model = make_vae(tmp_path)
    toy = ["--count=8", "--mosaic=2", "--height=32", "--width=40", "--repeats=1", f"--model={model}", "--latents=1"]
    record, _ = measure(decode, *toy)
    assert (record["images"], record["reduced"]) == (2, 2)
    assert record["images_per_s"].keys() == {"Pillow alone", "full", "reduced"}
    files = photographs.jpegs_of(decode.option_parser().parse_args(toy))
    recipe = ImageConfig(height=32, width=40).recipe
    assert np.array_equal(decode.by_pillow(files, recipe), decode.by_build(files, recipe)), "the same work"


# webdataset leaves its tars open for the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_every_rival_of_the_loader_has_a_figure(measure, folder):
    record, _ = measure(loader, "--samples=96", "--batch-size=32", "--repeats=1", folder)
    packages = dict(zip(loader.READERS, ("zarr", "zarrs", "tensorstore"), strict=True))
    missing = [name for name, package in packages.items() if find_spec(package) is None]
    skipped = {f"{name}{order}" for name in missing for order in ("", loader.IN_ORDER)}
    assert set(record["samples_per_s"]) == loader.PASSES.keys() - skipped
    assert all(figures["median"] > 0 for figures in record["samples_per_s"].values())
    assert record["disk_bytes"]["none"] > 96 * 25_088


def test_reading_from_a_store_is_measured_with_its_requests_and_bytes(measure, monkeypatch):
    """The peers, whose packages are an extra, take part only if installed."""
    pytest.importorskip("obstore", reason="needs obstore, of the extra object-stores")
    for name in object_server.environment(""):
        monkeypatch.setenv(name, "")  # the benchmark sets it; this restores it
    toy = ["--samples=200", "--batch-size=8", "--samples-per-shard=100", "--repeats=1"]
    record, _ = measure(remote, *toy, "--latency-ms=1", "--connection-mb-per-s=1000")
    sides = {remote.OURS, remote.OURS_IN_BLOCKS, remote.BOUND_RANGES, remote.BOUND_FILES}
    assert record["samples_per_s"].keys() == sides | remote.PEERS.keys() - {*record["not_installed"]}
    assert all(figures["median"] > 0 for figures in record["samples_per_s"].values())


def test_the_measurements_for_a_gpu_run_here_at_toy_size(measure, folder):
    """The tests marked with gpu, the fourth command, are left to pytest."""
    toy = ["--count=40", "--batch-size=4", "--height=32", "--width=40", "--vae=demo", folder]
    last, lines = measure(on_gpu, "encode", "--sides", "16", "24", "--batch-size=2", "--repeats=1", "--base-dim=8")
    records = [*(json.loads(line) for line in lines if line.startswith("{")), last]
    assert [record["settings"]["height"] for record in records] == [16, 24]
    record, _ = measure(on_gpu, "builds", *toy, "--workers", "1", "--cores", "1", "2")
    assert record["builds"].keys() >= {"1 cores, 1 workers"}
    assert all(0 < each["encoder_works"] <= 1 for each in record["builds"].values())
    assert record["best"] in record["builds"]
    record, _ = measure(on_gpu, "checks", *toy)
    assert record["canary"]["float32"]["overall"] < record["canary"]["bfloat16"]["overall"] < 0.03
    assert record["audit_on_cpu"]["findings"] == 0


def test_every_family_is_measured_against_its_library(measure, tmp_path):
    """Small models in folders are measured; each model of full size can be made."""
    for kind in VAES:
        kind.save(tmp_path / str(kind))
    toy = ["--height=64", "--width=64", "--repeats=1", "--model", *map(str, sorted(tmp_path.iterdir()))]
    record, _ = measure(families, *toy)
    assert record["ratios"].keys() == {str(kind) for kind in VAES}
    assert record["images_per_s"].keys() == {f"{kind}, {side}" for kind in VAES for side in ("library", "here")}
    with torch.device("meta"):
        made = [families.make(name) for name in families.FAMILIES]
    assert min(sum(weight.numel() for weight in model.parameters()) for model in made) > 1e6


def test_torchrun_in_a_store_gives_the_same_after_a_kill(measure, folder, bucket, monkeypatch):
    """The way that no other test starts for real."""
    monkeypatch.setitem(identities.WAYS, "store-torchrun", identities.WAYS["torchrun"])
    toy = ["--count=4", "--batch-size=2", "--height=16", "--width=24", folder, f"--url={bucket}"]
    record, _ = measure(identities, *toy, "--ways", "store-torchrun")
    assert record["skipped"] == {}
    assert [each["equal_files"] for each in record["ways"].values()] == ["all"]
