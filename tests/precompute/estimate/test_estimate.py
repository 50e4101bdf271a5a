"""`precompute estimate` on a small source: its figures and refusals; it writes nothing."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import yaml

from cache_store.storage.local import LocalStore
from precompute.cli import main
from precompute.estimate import sizes
from precompute.estimate.costs import WARM_UP_STEPS, read_step
from precompute.estimate.estimate import KEPT_RUNS, RUN_SAMPLES, draw, full
from tests.precompute.conftest import GOOD, SAMPLES
from tests.videos import make_video
from trainer.insight.log import append_step
from trainer.run import folder as trainer_run

PRICES = ["--dollars-per-gpu-hour", 2, "--dollars-per-gb-month", 0.02]


def write_run(folder, seconds, batch_size=32, waited=0.0):
    """Make a run's folder as `trainer train` leaves it."""
    folder.mkdir()
    (folder / trainer_run.CONFIG_FILE).write_text(yaml.safe_dump({"data": {"batch_size": batch_size}}))
    for step, each in enumerate(seconds, 1):
        append_step(folder, {"step": step, "samples_per_s": batch_size / each, "data_wait_share": waited})
    return folder


def test_an_estimate_says_what_a_build_takes_and_writes_nothing(project):
    files = sorted(project.folder.rglob("*"))
    said = project.run(main, "estimate", "--config", project.config(), "--seconds", 0.01, "--epochs", 3, *PRICES)
    assert sorted({*project.folder.rglob("*")} - {*files}) == [project.folder / "cache.yaml"]
    for line in (
        rf"{SAMPLES} samples; \d+ drawn at random, probed for",
        r"rejected among these: \d cannot decode",
        r"decode alone .* images/s",
        r"encode alone .* cpu",
        r"write alone .* images/s +without the disk",
        r"workers +1 +4 +8 +64",
    ):
        assert re.search(line, said), said
    sizes = dict(re.findall(r"^(none|lz4|zstd).* {2}([\d,]+) ", said, re.MULTILINE))
    assert sizes.keys() == {"none", "lz4", "zstd"}
    assert sizes["none"] == str(16 * 4 * 5 * 2 + 4)
    assert said.count(": caching pays, ") + said.count(": caching does not pay, ") == 3
    assert "training, batches of 64: " in said


def test_a_place_where_no_cache_can_be_is_refused_as_by_a_build(project, bucket, monkeypatch):
    """Before the encoder is loaded."""
    monkeypatch.setattr("precompute.estimate.estimate.load_encoder", None)
    chat = project.source / "chat.json"
    no_bucket = f"there is no bucket '{bucket[5:]}-x': check its name, AWS_REGION"
    for place, code, why in ((f"{bucket}-x/cache", 1, no_bucket), (chat, 2, f"cache: {chat} is not a folder\n")):
        asked = ["--config", project.config(), "--cache", place]
        built, estimated = (project.run(main, command, *asked, code=code) for command in ("build", "estimate"))
        assert estimated == built
        assert estimated.startswith(f"precompute: error: {why}")
        assert estimated.count("\n") == 1


def test_a_store_that_cannot_say_its_free_space_is_estimated(project, bucket):
    said = project.run(main, "estimate", "--config", project.config(), "--seconds", 0.01, "--cache", f"{bucket}/new")
    assert f"free at {bucket}/new: unknown\n" in said


def test_a_build_is_no_faster_than_its_writer(project, monkeypatch):
    """Among others, it is slow with zstd."""
    measured = sizes.measure_size
    monkeypatch.setattr(sizes, "measure_size", lambda *given: replace(measured(*given), write_per_s=0.5))
    said = project.run(main, "estimate", "--config", project.config(), "--seconds", 0.01)
    assert re.search(r"a worker +0.5 images/s +bound by the writing", said)
    assert re.search(rf"^build: {SAMPLES * 2} s on one worker", said, re.MULTILINE)


@pytest.mark.parametrize("store_format", ["zarr", "webdataset"])
def test_the_whole_cache_is_estimated_with_tables_and_records(project, store_format):
    project.has(GOOD)
    project.settings = {"store__format": store_format, "store__samples_per_shard": 10}
    said = project.run(main, "estimate", "--config", project.config(), "--seconds", 0.01)
    estimated = float(re.search(r"^none \(chosen\) .* ([\d.]+) KB$", said, re.MULTILINE)[1]) * 1e3
    project.build()
    built = sum(path.stat().st_size for path in project.cache.rglob("*") if path.is_file())
    outside = sum((project.cache / name).stat().st_size for name in ("seal.json", "build.json"))
    assert estimated == pytest.approx(built - outside, rel=0.1)


def test_the_step_time_comes_from_a_run(project):
    run = write_run(project.folder / "run", [9.0] * WARM_UP_STEPS + [0.4, 0.5, 0.6], waited=0.2)
    assert (read_step(run).step_s, read_step(run).batch_size) == (pytest.approx(0.4), 32)
    asked = ["--seconds", 0.01, "--run", run, "--store.format", "webdataset", *PRICES]
    said = project.run(main, "estimate", "--config", project.config(), *asked)
    assert "training, batches of 32: " in said
    assert re.search(r"^0\.4 s ", said, re.MULTILINE)
    assert re.search(r"^none \(chosen\)", said, re.MULTILINE)
    assert "zstd" not in said, "tars know no codec"
    assert said.endswith(": give --epochs N\n"), "for money"


def test_an_estimate_of_clips_speaks_of_clips_and_counts_those_of_every_video(vae_path, tmp_path, capsys):
    (tmp_path / "videos").mkdir()
    for name, frames in (("a", 4), ("b", 24)):
        make_video(tmp_path / "videos" / f"{name}.mp4", frames=frames, fps=16)
    clip = ["--clip.frames", 5, "--clip.fps", 16, "--clip.pick", "chunk", "--image.height", 32, "--image.width", 40]
    source = ["--source.kind", "folder", "--source.path", tmp_path / "videos", "--cache", tmp_path / "cache"]
    model = ["--encoder.model", vae_path, "--encoder.device", "cpu", "--encoder.batch_size", 1]
    asked = [*clip, *source, *model, "--seconds", 0.01, "--dollars-per-gpu-hour", 2]
    assert main(["estimate", *map(str, asked)]) == 0
    said = capsys.readouterr().out
    for line in (
        r"5 samples; \d drawn at random",
        "rejected among these: 1 too short",
        "decode alone .* clips/s",
        "a worker .* clips/s",
        r"a million clips at \$2 a GPU-hour: \$",
        f"none .* {16 * 2 * 4 * 5 * 2 + 4:,} ",
        r"training, batches of 1: encoding adds .*\n.*\n1 s .*\n3 s .*\n10 s ",
    ):
        assert re.search(line, said), said
    assert "image" not in said


def test_a_source_without_a_readable_image_is_refused(project):
    project.has([4, 13])
    said = project.run(main, "estimate", "--config", project.config(), "--seconds", 0.01, code=1)
    assert "all 2 samples" in said


def test_an_estimate_of_a_cache_that_does_not_fit_fails(project, monkeypatch):
    monkeypatch.setattr(LocalStore, "free_bytes", lambda store: 11_000)
    said = project.run(main, "estimate", "--config", project.config(), "--seconds", 0.01, code=1)
    assert "11.0 KB" in said


def test_every_run_of_a_list_is_drawn_as_often():
    listed = [{"id": number} for number in range((KEPT_RUNS + 2) * RUN_SAMPLES)]
    drawn = [draw(listed, 8, seed) for seed in range(200)]
    assert {each.count for each in drawn} == {len(listed)}
    assert {len(each.runs) for each in drawn} == {KEPT_RUNS}
    kept = Counter(run[0]["id"] for each in drawn for run in each.runs)
    assert len(kept) == KEPT_RUNS + 2
    assert min(kept.values()) > 200 * KEPT_RUNS / (KEPT_RUNS + 2) - 30
    first = Counter(each.runs[0][0]["id"] for each in drawn)
    assert max(first.values()) < 20, "and in any order"
    assert full([range(3), range(3), range(1)], 3) == [range(3)] * 2
    assert full([range(1)], 3) == [range(1)]
