"""Each benchmark at toy size prints a table, and one JSON record as its last line."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import (
    build,
    cold,
    decode,
    decode_parts,
    encode,
    families,
    feed,
    loader,
    loader_zarr,
    on_gpu,
    ray_data,
    remote,
    scale,
    switches,
    train_step,
    verify,
)
from benchmarks.remote_peers import installed_peers
from precompute.images.decode import ImageConfig
from tests.precompute.conftest import make_vae
from tests.precompute.encoders.test_vaes import VAES

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


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a benchmark with wrong options; return its message."""

    def run(benchmark: Any, *options: str, codes: tuple[int, ...] = (2,)) -> str:
        assert benchmark.main(options) in codes
        return capsys.readouterr().err

    return run


def test_encode_measures_both_paths_in_both_dtypes(measure, refused):
    assert "argument --height: must be a whole number of at least 1, got tall" in refused(encode, "--height=tall")
    toy = ["--height=16", "--width=24", "--batch-size=2", "--repeats=2", "--base-dim=8", "--device=cpu"]
    record, table = measure(encode, *toy)
    assert {"command", "revision", "baseline"} <= record.keys()
    assert (record["benchmark"], record["versions"]["torch"]) == ("encode", torch.__version__)
    assert record["hardware"]["cpu"]
    assert record["settings"].items() >= {"base_dim": 8, "device": "cpu"}.items()
    rivals = {f"{path} {dtype}" for path in ("diffusers", "folded") for dtype in ("float32", "bfloat16")}
    assert record["images_per_s"].keys() == record["peak_share"].keys() == rivals
    for speed in (*record["images_per_s"].values(), *record["speedup"].values()):
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
    pairs = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
    assert set(record["speedup"]) == {f"folded {ours} over diffusers {theirs}" for ours, theirs in pairs}
    assert any(line.startswith("folded bfloat16 ") and line.endswith("%") for line in table)
    assert sum(" over " in line and "x  (" in line for line in table) == 3


def test_a_build_is_measured_against_its_parts(measure, folder):
    toy = ["--count=4", "--batch-size=2", "--height=16", "--width=24", "--repeats=1"]
    record, _ = measure(build, *toy, folder, "--compute-dtype=float32")
    assert {"build", "decode only", "encode only"} == record["images_per_s"].keys()
    over_slower, over_both = record["build_over_the_slower"]["median"], record["build_over_both_in_turn"]["median"]
    assert 0 < over_slower <= over_both
    assert {"4", "40"} == record["peak_mib"].keys()


def test_decode_measures_speed_over_pillow_and_differences(measure, tmp_path):
    model = make_vae(tmp_path)
    toy = ["--count=8", "--mosaic=2", "--height=32", "--width=40", "--repeats=1", f"--model={model}", "--latents=1"]
    record, _ = measure(decode, *toy)
    assert (record["images"], record["reduced"]) == (2, 2)
    assert {"Pillow alone", "full", "reduced"} == record["images_per_s"].keys()
    apart = record["differences_from_full"]
    assert {f"pixels, {name}" for name in ("reduced", "bicubic")} < apart.keys()
    assert 0 < apart["pixels, reduced"]["mean"] < 1
    assert 0 < apart["latents, reduced"]["rms"] < 0.2
    files = decode.jpegs_of(decode.option_parser().parse_args(toy))
    recipe = ImageConfig(height=32, width=40).recipe
    assert np.array_equal(decode.by_pillow(files, recipe), decode.by_build(files, recipe)), "the same work"


def test_photographs_are_only_the_images_of_a_folder(refused, tmp_path):
    """They are the images that a build of the folder takes, those of subfolders too."""
    (tmp_path / "one").mkdir()
    for name in ("b.jpg", "b.txt", "b.json", "one/a.PNG", "._b.jpg"):
        (tmp_path / name).write_bytes(name.encode())
    options = decode.option_parser().parse_args([f"--images={tmp_path}"])
    assert decode.jpegs_of(options) == [b"b.jpg", b"one/a.PNG"]
    (tmp_path / "empty").mkdir()
    for more, message in (
        ([f"--images={tmp_path}/empty"], "empty holds no image: no file with a suffix such as .jpg or .png"),
        ([f"--images={tmp_path}", "--mosaic=2"], f"{tmp_path}: 2 images, expected at least 4, for one image of --mosa"),
        ([f"--images={tmp_path}/none"], "none is neither a folder nor a file; expected a folder, a zip or a tar"),
        (["--count=0"], "argument --count: must be a whole number of at least 1, got 0"),
    ):
        assert message in refused(decode, *more, codes=(1, 2))


def test_the_time_that_a_build_adds_to_decoding_is_measured(measure, refused):
    assert "--height and --width must be multiples of 8" in refused(decode_parts, "--height=30")
    toy = ["--count=4", "--height=32", "--width=40", "--batch-size=3", "--repeats=1"]
    record, _ = measure(decode_parts, *toy)
    for threads, us in record["us_an_image"].items():
        assert min(us.values()) > 0
        bare, by_script, build = (us[name] for name in ("Pillow alone", "Pillow into arrays", "a build"))
        assert record["added"][threads]["checks and bookkeeping"] == pytest.approx((build - by_script) / bare, abs=1e-3)


# webdataset leaves its tars open for the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_every_rival_of_the_loader_delivers_each_latent_once(measure, folder, tmp_path_factory):
    record, _ = measure(loader, "--samples=96", "--batch-size=32", "--repeats=1", folder)
    skipped = {f"{name}{order}" for name in loader_zarr.MISSING for order in ("", loader.IN_ORDER)}
    assert record["skipped"] == loader_zarr.MISSING
    assert set(record["samples_per_s"]) == loader.PASSES.keys() - skipped
    assert all(figures["median"] > 0 for figures in record["samples_per_s"].values())
    assert record["disk_bytes"]["none"] > 96 * 25_088
    latents = np.random.default_rng(0).standard_normal((12, *loader.SHAPE), np.float32).astype(np.float16)
    stored = sorted(sample.tobytes() for sample in latents)
    loaders = loader.prepare(tmp_path_factory.mktemp("rivals"), latents, batch_size=4, samples_per_shard=5)
    for name, batches in loaders.items():
        delivered = [sample.tobytes() for batch in batches(np.random.default_rng(1)) for sample in batch.copy()]
        assert sorted(delivered) == stored, name


def test_all_sides_read_a_cache_that_is_not_in_memory(measure, refused, folder):
    toy = ["--samples=24", "--samples-per-shard=9", "--batch-size=4", "--batches=3", "--repeats=2"]
    record, _ = measure(cold, *toy, folder)
    names = {f"{codec}, {side}" for codec in cold.CODECS for side in cold.SIDES}
    assert record["samples_per_s"].keys() == record["disk_bytes_a_sample"].keys() == names
    assert all(figures["min"] > 0 for figures in record["samples_per_s"].values())
    assert record["ratios"].keys() == {*cold.CODECS}
    assert "--batches times --batch-size must be at most 24" in refused(cold, *toy, "--batches=7")


def test_verify_is_measured_against_hashes_of_its_files(measure, folder):
    toy = ["--samples=12", "--samples-per-shard=4", "--quick-shards=3", "--repeats=1"]
    record, table = measure(verify, *toy, folder)
    forms = {f"{store_format} {codec}" for store_format, codec in verify.FORMS}
    ours = {f"{level}, {jobs} jobs" for level in verify.LEVELS for jobs in verify.JOBS}
    assert set(record["gb_per_s"]) == {f"{form}: {work}" for form in forms for work in {*ours, *verify.BASELINES}}
    assert len(record["ratios"]) == len(forms) * len(ours) * len(verify.BASELINES)
    measured = [*record["gb_per_s"].values(), record["quick_s_per_1000_shards"]]
    assert all(figures["median"] > 0 for figures in measured)
    assert table[-1].startswith("quick: ")


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:ray", "ignore:.use_push_based_shuffle:DeprecationWarning")
def test_actors_and_ray_data_give_the_same_samples(measure, folder):
    pytest.importorskip("ray", reason="needs the extra ray")
    toy = ["--count=4", "--batch-size=2", "--height=16", "--width=24", "--repeats=1"]
    record, _ = measure(ray_data, *toy, folder, "--compute-dtype=float32")
    assert record["images_per_s"].keys() == {"actors", "Ray Data"}
    assert record["equal_samples"] == "4 of 4"


def test_scale_measures_every_step_by_the_number_of_samples(measure, refused, folder, monkeypatch):
    """The larger of two sizes has no plan. Here the steps run in this process."""
    assert "--step measures a cache in --folder; name it" in refused(scale, "--step=plan-lines")
    monkeypatch.setattr(scale, "in_process", scale.measured)
    record, table = measure(scale, "--samples", "5000", "9000", "--planned=5000", folder)
    planned, unplanned = record["results"].values()
    assert list(planned) == list(scale.STEPS)
    assert planned.keys() - unplanned.keys() == {"plan-parquet", "plan-lines", "rerun", "rerun-half", "rank-half"}
    assert all(step["peak_mib"] > 0 for step in planned.values())
    assert len(table) == 1 + len(scale.STEPS)


def test_reading_from_a_store_is_measured_with_its_requests_and_bytes(measure, monkeypatch):
    """The peers, whose packages are an extra, take part only if installed."""
    pytest.importorskip("obstore", reason="needs obstore, of the extra object-stores")
    for name in remote.environment(""):
        monkeypatch.setenv(name, "")  # the benchmark sets it; this restores it
    toy = ["--samples=200", "--batch-size=8", "--samples-per-shard=100", "--repeats=1"]
    record, _ = measure(remote, *toy, "--latency-ms=1", "--connection-mb-per-s=1000")
    bounds = {remote.BOUND_RANGES, remote.BOUND_FILES}
    assert record["samples_per_s"].keys() == {remote.OURS, remote.OURS_IN_BLOCKS, *bounds, *installed_peers()}
    assert all(figures["median"] > 0 for figures in record["samples_per_s"].values())
    anywhere, in_blocks = (record["traffic"][name] for name in (remote.OURS, remote.OURS_IN_BLOCKS))
    assert 0 < in_blocks["requests_a_sample"] < anywhere["requests_a_sample"]
    assert min(each["bytes_a_sample"] for each in (anywhere, in_blocks)) > remote.SAMPLE_BYTES


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:ray", "ignore::ResourceWarning")
@pytest.mark.parametrize(("decode", "workers"), [("stub", 1), ("real", 2)])
def test_a_build_is_measured_around_an_encoder_that_sleeps(measure, folder, decode, workers):
    """The DataLoader is the only peer here: the others are extras, and take seconds to start."""
    toy = ["--samples=24", "--samples-per-shard=8", "--batch-size=4", "--height=32", "--width=40", "--count=5"]
    options = [*toy, "--encoder-ms=2", "--repeats=1", "--peers", "DataLoader", folder]
    record, table = measure(feed, *options, f"--decode={decode}", f"--workers={workers}")
    decoding = {feed.DECODING} if decode == "real" else set()
    assert record["rivals"].keys() == record["over_rivals"].keys() == {feed.ENCODER, "DataLoader"} | decoding
    assert (record["workers"], record["skipped"]) == (workers, {})
    assert 0 < record["images_per_s"]["median"] < 24 / 6 / 0.002 * 4
    assert record["share_of_encoder"] == record["over_rivals"][feed.ENCODER]
    parts = record["cpu_us_an_image"]
    assert parts.keys() >= {"read", "hash", "decode", "fit", "encoder", "statistics", "sample writing", "commit"}
    assert sum(parts.values()) == pytest.approx(2 * parts["all"], rel=1e-3)
    assert any(line.startswith("DataLoader ") for line in table)


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


def test_a_cached_step_is_measured_against_memory_and_against_the_usual_loop(measure):
    toy = ["--widths=16", "--layers=1", "--vocabulary=64", "--samples=16", "--batch-size=2", "--repeats=8"]
    record, table = measure(train_step, *toy, "--height=32", "--width=32")
    found = record["widths"]["16"]
    ratio, low, high = found["cache_over_memory"]
    assert 0 < low <= ratio <= high
    assert found["seconds"].keys() == {"cache", "memory", "loop"}
    assert found["loop_parts_s"].keys() == {"decode", "encode", "language model"}
    assert any(found["verdict"] in line for line in table)


def test_every_family_is_measured_against_its_library(measure, refused, tmp_path):
    """Small models in folders are measured; each model of full size can be made."""
    for kind in VAES:
        kind.save(tmp_path / str(kind))
    assert "invalid choice: 'none'" in refused(families, "--families=none")
    toy = ["--height=64", "--width=64", "--repeats=1", "--model", *map(str, sorted(tmp_path.iterdir()))]
    record, table = measure(families, *toy)
    assert record["speedup"].keys() == {str(kind) for kind in VAES}
    assert len(table) == len(VAES) + 1
    for sides in record["images_per_s"].values():
        assert {"library", "here"} == sides.keys()
    with torch.device("meta"):
        made = [families.make(name) for name in families.FAMILIES]
    assert min(sum(weight.numel() for weight in model.parameters()) for model in made) > 1e6


def test_each_pair_of_switches_has_configs_and_one_is_compared_on_the_same_batches(measure):
    files = {path.stem for path in switches.CONFIGS.glob("*.yaml")}
    assert files == {side for pair in switches.PAIRS.values() for side in pair}
    toy = ["--model-width=16", "--layers=1", "--vocabulary=64", "--samples=16", "--batch-size=2", "--steps=10"]
    record, table = measure(switches, *toy, "--height=32", "--width=32", "--pairs=loss_chunk")
    assert table[-1].startswith("| loss-whole, loss-chunked | ")
    assert record["pairs"]["loss_chunk"]["max_loss_delta"] < 1e-4
