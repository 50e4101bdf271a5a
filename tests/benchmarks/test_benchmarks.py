"""Each benchmark at toy size: a table for people, and one JSON record as the last line."""

import json

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


def test_encode_measures_both_paths_in_both_dtypes(capsys):
    assert encode.main(["--height", "tall"]) == 2
    assert "argument --height: must be a whole number of at least 1, got tall" in capsys.readouterr().err
    toy = ["--height=16", "--width=24", "--batch-size=2", "--repeats=2", "--base-dim=8", "--device=cpu"]
    assert encode.main(toy) == 0
    *table, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
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


def test_a_build_is_measured_against_its_parts(capsys, tmp_path):
    toy = ["--count=4", "--batch-size=2", "--height=16", "--width=24", "--repeats=1", f"--folder={tmp_path}"]
    assert build.main([*toy, "--compute-dtype=float32"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"build", "decode only", "encode only"} == record["images_per_s"].keys()
    over_slower, over_both = record["build_over_the_slower"]["median"], record["build_over_both_in_turn"]["median"]
    assert 0 < over_slower <= over_both
    assert {"4", "40"} == record["peak_mib"].keys()
    assert list(tmp_path.iterdir()) == [], "what was written for the run is removed"


def test_decode_measures_speed_over_pillow_and_differences(capsys, tmp_path):
    model = make_vae(tmp_path)
    toy = ["--count=8", "--mosaic=2", "--height=32", "--width=40", "--repeats=1", f"--model={model}", "--latents=1"]
    assert decode.main(toy) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["images"], record["reduced"]) == (2, 2)
    assert {"Pillow alone", "full", "reduced"} == record["images_per_s"].keys()
    apart = record["differences_from_full"]
    assert {f"pixels, {name}" for name in ("reduced", "bicubic")} < apart.keys()
    assert 0 < apart["pixels, reduced"]["mean"] < 1
    assert 0 < apart["latents, reduced"]["rms"] < 0.2
    files = decode.jpegs_of(decode.option_parser().parse_args(toy))
    recipe = ImageConfig(height=32, width=40).recipe
    assert np.array_equal(decode.by_pillow(files, recipe), decode.fitted(files, recipe)), "the same work"


def test_photographs_are_the_images_of_a_folder_alone(capsys, tmp_path):
    """As a build of the folder takes them, in folders below it too."""
    (tmp_path / "one").mkdir()
    for name in ("b.jpg", "b.txt", "b.json", "one/a.PNG", "._b.jpg"):
        (tmp_path / name).write_bytes(name.encode())
    options = decode.option_parser().parse_args([f"--images={tmp_path}"])
    assert decode.jpegs_of(options) == [b"b.jpg", b"one/a.PNG"]
    (tmp_path / "empty").mkdir()
    for more, said in (
        ([f"--images={tmp_path}/empty"], "empty holds no image: no file with a suffix such as .jpg or .png"),
        ([f"--images={tmp_path}", "--mosaic=2"], f"{tmp_path}: 2 images, expected at least 4, for one image of --mosa"),
        ([f"--images={tmp_path}/none"], "none is neither a folder nor a file; expected a folder, a zip or a tar"),
        (["--count=0"], "argument --count: must be a whole number of at least 1, got 0"),
    ):
        assert decode.main(more) in (1, 2)
        assert said in capsys.readouterr().err


def test_what_a_build_adds_to_decoding_is_measured(capsys):
    assert decode_parts.main(["--height=30"]) == 2
    assert "--height and --width must be multiples of 8" in capsys.readouterr().err
    assert decode_parts.main(["--count=4", "--height=32", "--width=40", "--batch-size=3", "--repeats=1"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    for threads, us in record["us_an_image"].items():
        assert min(us.values()) > 0
        bare, by_script, build = (us[name] for name in ("Pillow alone", "Pillow into arrays", "a build"))
        assert record["added"][threads]["checks and bookkeeping"] == pytest.approx((build - by_script) / bare, abs=1e-3)


# webdataset leaves its tars open for the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_every_rival_of_the_loader_delivers_each_latent_once(capsys, tmp_path):
    options = ["--samples", "96", "--batch-size", "32", "--repeats", "1", "--folder", str(tmp_path)]
    assert loader.main(options) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    kinds = ("", loader.IN_ORDER)
    skipped = {f"{name}{kind}" for name in loader_zarr.MISSING for kind in kinds}
    assert record["skipped"] == loader_zarr.MISSING
    assert set(record["samples_per_s"]) == loader.PASSES.keys() - skipped
    assert all(figures["median"] > 0 for figures in record["samples_per_s"].values())
    assert record["disk_bytes"]["none"] > 96 * 25_088
    assert list(tmp_path.iterdir()) == [], "what was written for the run is removed"
    latents = np.random.default_rng(0).standard_normal((12, *loader.SHAPE), np.float32).astype(np.float16)
    stored = sorted(sample.tobytes() for sample in latents)
    for name, batches in loader.prepare(tmp_path, latents, batch_size=4, samples_per_shard=5).items():
        delivered = [sample.tobytes() for batch in batches(np.random.default_rng(1)) for sample in batch.copy()]
        assert sorted(delivered) == stored, name


def test_both_ways_read_a_cache_that_is_not_in_memory(capsys, tmp_path):
    toy = ["--samples=24", "--samples-per-shard=9", "--batch-size=4", "--batches=3", "--repeats=2"]
    assert cold.main([*toy, f"--folder={tmp_path}"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = {f"{codec}, {side}" for codec in cold.CODECS for side in cold.SIDES}
    assert record["samples_per_s"].keys() == record["disk_bytes_a_sample"].keys() == names
    assert all(figures["min"] > 0 for figures in record["samples_per_s"].values())
    assert record["ratios"].keys() == {*cold.CODECS}
    assert cold.main([*toy, "--batches=7"]) == 2
    assert "--batches times --batch-size must be at most 24" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "what was written for the run is removed"


def test_verify_is_measured_against_hashes_of_its_files(capsys, tmp_path):
    toy = ["--samples=12", "--samples-per-shard=4", "--quick-shards=3", "--repeats=1", f"--folder={tmp_path}"]
    assert verify.main(toy) == 0
    *table, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    forms = {f"{store_format} {codec}" for store_format, codec in verify.FORMS}
    ours = {f"{level}, {jobs} jobs" for level in verify.LEVELS for jobs in verify.JOBS}
    assert set(record["gb_per_s"]) == {f"{form}: {work}" for form in forms for work in {*ours, *verify.BASELINES}}
    assert len(record["ratios"]) == len(forms) * len(ours) * len(verify.BASELINES)
    measured = [*record["gb_per_s"].values(), record["quick_s_per_1000_shards"]]
    assert all(figures["median"] > 0 for figures in measured)
    assert table[-1].startswith("quick: ")
    assert list(tmp_path.iterdir()) == [], "what was written for the run is removed"


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:ray", "ignore:.use_push_based_shuffle:DeprecationWarning")
def test_actors_and_ray_data_give_the_same_samples(capsys, tmp_path):
    pytest.importorskip("ray", reason="needs the extra ray")
    toy = ["--count=4", "--batch-size=2", "--height=16", "--width=24", "--repeats=1", f"--folder={tmp_path}"]
    assert ray_data.main([*toy, "--compute-dtype=float32"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["images_per_s"].keys() == {"actors", "Ray Data"}
    assert record["equal_samples"] == "4 of 4"


def test_scale_measures_every_step_in_a_process_of_its_own(capsys, tmp_path, monkeypatch):
    """Two sizes, of which the larger has no plan; here, the steps run in this process."""
    assert scale.main(["--step=plan-lines"]) == 2
    assert "--step measures a cache in --folder; name it" in capsys.readouterr().err
    monkeypatch.setattr(scale, "in_process", scale.measured)
    assert scale.main(["--samples", "5000", "9000", "--planned=5000", f"--folder={tmp_path}"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    planned, unplanned = json.loads(last)["results"].values()
    assert list(planned) == list(scale.STEPS)
    assert planned.keys() - unplanned.keys() == {"plan-parquet", "plan-lines", "rerun", "rerun-half", "rank-half"}
    assert all(step["peak_mib"] > 0 for step in planned.values())
    assert len(table) == 1 + len(scale.STEPS)
    assert list(tmp_path.iterdir()) == [], "what was written for the run is removed"


def test_reading_from_a_store_is_measured_with_what_it_asks_for(capsys, monkeypatch):
    """Without its peers, whose packages are an extra."""
    pytest.importorskip("obstore", reason="needs obstore, of the extra object-stores")
    for name in remote.environment(""):
        monkeypatch.setenv(name, "")  # which is undone
    toy = ["--samples=200", "--batch-size=8", "--samples-per-shard=100", "--repeats=1"]
    assert remote.main([*toy, "--latency-ms=1", "--connection-mb-per-s=1000"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    bounds = {remote.BOUND_RANGES, remote.BOUND_FILES}
    assert record["samples_per_s"].keys() == {remote.OURS, remote.OURS_IN_BLOCKS, *bounds, *installed_peers()}
    assert all(figures["median"] > 0 for figures in record["samples_per_s"].values())
    anywhere, in_blocks = (record["traffic"][name] for name in (remote.OURS, remote.OURS_IN_BLOCKS))
    assert 0 < in_blocks["requests_a_sample"] < anywhere["requests_a_sample"]
    assert min(each["bytes_a_sample"] for each in (anywhere, in_blocks)) > remote.SAMPLE_BYTES


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:ray", "ignore::ResourceWarning")
@pytest.mark.parametrize(("decode", "workers"), [("stub", 1), ("real", 2)])
def test_a_build_is_measured_around_an_encoder_that_sleeps(capsys, tmp_path, decode, workers):
    """Beside the DataLoader; the other peers are extras, and take seconds to start."""
    toy = ["--samples=24", "--samples-per-shard=8", "--batch-size=4", "--height=32", "--width=40", "--count=5"]
    options = [*toy, "--encoder-ms=2", "--repeats=1", "--peers", "DataLoader", f"--folder={tmp_path}"]
    assert feed.main([*options, f"--decode={decode}", f"--workers={workers}"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    decoding = {feed.DECODING} if decode == "real" else set()
    assert record["rivals"].keys() == record["over_rivals"].keys() == {feed.ENCODER, "DataLoader"} | decoding
    assert (record["workers"], record["skipped"]) == (workers, {})
    assert 0 < record["images_per_s"]["median"] < 24 / 6 / 0.002 * 4
    assert record["share_of_encoder"] == record["over_rivals"][feed.ENCODER]
    parts = record["cpu_us_an_image"]
    assert parts.keys() >= {"read", "hash", "decode", "fit", "encoder", "statistics", "sample writing", "commit"}
    assert sum(parts.values()) == pytest.approx(2 * parts["all"], rel=1e-3)
    assert any(line.startswith("DataLoader ") for line in table)
    assert list(tmp_path.iterdir()) == [], "what was written for the run is removed"


def test_all_that_a_gpu_is_to_show_runs_here_at_toy_size(capsys, tmp_path):
    """So that whoever gets one only starts it; what pytest marks with gpu, pytest runs."""
    toy = ["--count=40", "--batch-size=4", "--height=32", "--width=40", "--vae=demo", f"--folder={tmp_path}"]
    assert on_gpu.main(["encode", "--sides", "16", "24", "--batch-size=2", "--repeats=1", "--base-dim=8"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [record["settings"]["height"] for record in records] == [16, 24]
    assert on_gpu.main(["builds", *toy, "--workers", "1", "--cores", "1", "2"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["builds"].keys() >= {"1 cores, 1 workers"}
    assert all(0 < each["encoder_works"] <= 1 for each in record["builds"].values())
    assert record["best"] in record["builds"]
    assert on_gpu.main(["checks", *toy]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["canary"]["float32"]["overall"] < record["canary"]["bfloat16"]["overall"] < 0.03
    assert record["audit_on_cpu"]["findings"] == 0
    assert list(tmp_path.iterdir()) == [], "what was written for the run is removed"


def test_a_cached_step_is_measured_against_memory_and_against_the_usual_loop(capsys):
    toy = ["--widths=16", "--layers=1", "--vocabulary=64", "--samples=16", "--batch-size=2", "--repeats=8"]
    assert train_step.main([*toy, "--height=32", "--width=32"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["widths"]["16"]
    ratio, low, high = found["cache_over_memory"]
    assert 0 < low <= ratio <= high
    assert found["seconds"].keys() == {"cache", "memory", "loop"}
    assert found["loop_parts_s"].keys() == {"decode", "encode", "language model"}
    assert any(found["verdict"] in line for line in table)


def test_every_family_is_measured_against_its_library(capsys, tmp_path):
    """Measures models in folders; each of full size can be made."""
    for kind in VAES:
        kind.save(tmp_path / str(kind))
    assert families.main(["--families=none"]) == 2
    assert "invalid choice: 'none'" in capsys.readouterr().err
    toy = ["--height=64", "--width=64", "--repeats=1", "--model", *map(str, sorted(tmp_path.iterdir()))]
    assert families.main(toy) == 0
    *table, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert record["speedup"].keys() == {str(kind) for kind in VAES}
    assert len(table) == len(VAES) + 1
    for sides in record["images_per_s"].values():
        assert {"library", "here"} == sides.keys()
    with torch.device("meta"):
        made = [families.make(name) for name in families.FAMILIES]
    assert min(sum(weight.numel() for weight in model.parameters()) for model in made) > 1e6


def test_each_pair_of_switches_is_there_and_one_is_compared_on_the_same_batches(capsys):
    files = {path.stem for path in switches.CONFIGS.glob("*.yaml")}
    assert files == {side for pair in switches.PAIRS.values() for side in pair}
    toy = ["--model-width=16", "--layers=1", "--vocabulary=64", "--samples=16", "--batch-size=2", "--steps=10"]
    assert switches.main([*toy, "--height=32", "--width=32", "--pairs=loss_chunk"]) == 0
    *_, row, last = capsys.readouterr().out.splitlines()
    assert row.startswith("| loss-whole, loss-chunked | ")
    assert json.loads(last)["pairs"]["loss_chunk"]["max_loss_delta"] < 1e-4
