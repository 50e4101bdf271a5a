"""Builds through the command line: what is cached, what resumes, what is refused."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from cache_store import open_cache
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.encoders.config import EncoderConfig
from precompute.encoders.registry import load_encoder
from precompute.images.decode import ImageConfig, decode_image, fit_image, to_pixels
from tests.precompute.conftest import (
    BROKEN,
    SAMPLES,
    config_values,
    image_bytes,
    make_vae,
    sample_name,
    timeless_files,
    write_config,
    write_source,
)

GOOD = [number for number in range(SAMPLES) if number not in BROKEN]


@pytest.fixture
def build(tmp_path: Path, source_path: Path, vae_path: Path):
    """Run a build with overrides; returns its exit code."""

    def run(cache: Path | None = None, source: Path = source_path, vae: Path = vae_path, **overrides: object) -> int:
        values = config_values(cache or tmp_path / "cache", source, vae, **overrides)
        return main(["build", "--config", str(write_config(tmp_path / "build.yaml", values))])

    return run


def pixels_of(numbers: list[int], config: ImageConfig) -> torch.Tensor:
    images = [fit_image(decode_image(image_bytes(number), 10**6), config.recipe) for number in numbers]
    return torch.from_numpy(np.stack([to_pixels(image) for image in images]))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2**-11), ("float32", 0.0)])
def test_cached_latents_equal_a_direct_encode(build, tmp_path, vae_path, dtype, tolerance):
    """To rounding of the stored dtype: half a unit in the last place, relative."""
    assert build(store__dtype=dtype, encoder__batch_size=1) == 0
    cache = open_cache(tmp_path / "cache")
    encoder = load_encoder(EncoderConfig(model=str(vae_path), compute_dtype="float32", device="cpu"), "signed")
    config = ImageConfig(height=32, width=40)
    direct = torch.cat([encoder.encode(pixels_of([number], config)) for number in GOOD]).numpy()
    cached = cache.read(np.arange(len(cache))).astype(np.float32)
    np.testing.assert_allclose(cached, direct, rtol=tolerance, atol=2**-24 if tolerance else 0.0)


def test_every_planned_sample_is_cached_or_rejected_with_a_reason(build, tmp_path, capsys):
    assert build() == 0
    assert "22 planned = 20 cached + 2 rejected (2 cannot decode)" in capsys.readouterr().out
    cache = open_cache(tmp_path / "cache")
    assert (cache.seal.planned, cache.seal.cached, cache.seal.rejected) == (22, 20, 2)
    ids = cache.samples(np.arange(len(cache)), ["id"])["id"].to_pylist()
    assert ids == [sample_name(number) for number in GOOD]
    assert not verify(tmp_path / "cache", "full").findings


def test_rejects_do_not_move_their_neighbours(build, tmp_path):
    """The same samples with the broken images mended: every other latent keeps its bits."""
    assert build() == 0
    mended = {sample_name(number).replace("-", "_"): image_bytes(number) for number in BROKEN}
    whole = write_source(tmp_path / "whole", **mended)
    assert build(cache=tmp_path / "whole-cache", source=whole) == 0
    with_rejects, without = open_cache(tmp_path / "cache"), open_cache(tmp_path / "whole-cache")
    assert len(without) == SAMPLES
    np.testing.assert_array_equal(with_rejects.read(np.arange(len(GOOD))), without.read(np.array(GOOD)))


def test_a_second_build_of_the_same_inputs_has_the_same_bytes_and_identity(build, tmp_path):
    assert build() == build(cache=tmp_path / "other") == 0
    assert timeless_files(tmp_path / "cache") == timeless_files(tmp_path / "other")


def test_the_threads_that_torch_was_given_change_no_byte(build, tmp_path):
    """As OMP_NUM_THREADS gives them, or the machine: at this size 1 and 4 threads compute other last bits."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            assert build(cache=tmp_path / f"{threads}", run__workers=1) == 0
    finally:
        torch.set_num_threads(before)
    assert timeless_files(tmp_path / "1") == timeless_files(tmp_path / "4")


def test_one_and_three_workers_write_the_same_bytes(build, tmp_path):
    assert build() == 0
    assert build(cache=tmp_path / "three", run__workers=3) == 0
    assert timeless_files(tmp_path / "cache") == timeless_files(tmp_path / "three")
    assert not verify(tmp_path / "three", "full").findings


def times(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.name != ".claim"}


def test_a_finished_build_run_again_touches_nothing(build, tmp_path, capsys):
    assert build() == 0
    before = times(tmp_path / "cache")
    assert build() == 0
    assert "nothing to encode" in capsys.readouterr().out
    assert before == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.name != ".claim"
    }


def test_a_rerun_opens_no_file_of_the_cache_twice(build, tmp_path):
    assert build() == 0
    opened: list[str] | None = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and opened is not None and str(arguments[0]).startswith(str(tmp_path / "cache/")):
            opened.append(str(arguments[0]))

    sys.addaudithook(note)  # for good: it cannot be taken away
    assert build() == 0
    names, opened = sorted(Path(name).relative_to(tmp_path / "cache").as_posix() for name in opened), None
    records = [f"commits/{shard:06d}.json" for shard in range(3)]
    metadata = ["build.json", "latents/zarr.json", "plan.parquet", "seal.json", "zarr.json"]
    assert names == sorted([".claim", *records, *metadata])


def test_a_shard_that_lost_its_file_is_built_again_and_said(build, tmp_path, capsys):
    assert build() == 0
    before = timeless_files(tmp_path / "cache")
    (tmp_path / "cache/latents/c/1/0/0/0").unlink()
    assert build() == 0
    assert "shard 1 is built again" in capsys.readouterr().err
    assert timeless_files(tmp_path / "cache") == before


def refused(build, capsys, cache: Path, **changes: object) -> str:
    """Build once, then again with a change: refused, with nothing touched; returns what was said."""
    assert build(cache=cache) == 0
    before = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file() and path.name != ".claim"}
    capsys.readouterr()
    assert build(cache=cache, **changes) == 1
    after = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file() and path.name != ".claim"}
    assert before == after
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert "--cache NEW" in message
    return message


def test_other_weights_are_refused(build, capsys, tmp_path):
    message = refused(build, capsys, tmp_path / "cache", vae=make_vae(tmp_path / "other-vae", seed=1))
    assert "array.encoder.weights_sha256" in message


def test_another_size_is_refused(build, capsys, tmp_path):
    message = refused(build, capsys, tmp_path / "cache", image__height=40)
    assert "array.image.height  32            40" in message
    assert "weights" not in message


def test_another_sample_list_is_refused_by_id(build, capsys, tmp_path):
    other = write_source(tmp_path / "other", [*range(3, SAMPLES), 40])
    message = refused(build, capsys, tmp_path / "cache", source=other)
    assert "1 new (sample-040); 3 gone (sample-000, sample-001, sample-002)" in message


def test_an_image_with_other_bytes_is_refused_by_id(build, capsys, tmp_path):
    other = write_source(tmp_path / "other", sample_006=image_bytes(99))
    message = refused(build, capsys, tmp_path / "cache", source=other)
    assert "1 of 22 images are not the ones encoded: sample-006" in message


def test_an_image_that_is_gone_is_refused_by_id(build, capsys, tmp_path):
    folder = write_source(tmp_path / "folder")
    with zipfile.ZipFile(folder / "images.zip") as archive:
        archive.extractall(folder)
    images = {"source__images": str(folder)}
    values = {"source": folder, **images}
    assert build(cache=tmp_path / "cache", **values) == 0
    (folder / "sample-002.png").unlink()
    assert build(cache=tmp_path / "cache", **values) == 1
    assert "1 of 22 images are not the ones encoded: sample-002" in capsys.readouterr().err


def test_a_touched_file_with_the_same_bytes_is_no_change(build, tmp_path):
    folder = write_source(tmp_path / "folder")
    with zipfile.ZipFile(folder / "images.zip") as archive:
        archive.extractall(folder)
    assert build(source=folder, source__images=str(folder)) == 0
    (folder / "sample-002.png").touch()
    assert build(source=folder, source__images=str(folder)) == 0


def test_too_many_rejects_fail_the_build_and_say_why(build, tmp_path, capsys):
    assert build(run__max_reject_fraction=0.01) == 1
    message = capsys.readouterr().err
    assert "1 of 22 samples are rejected (1 cannot decode), more than run.max_reject_fraction 0.01" in message
    assert "cannot decode  1        sample-004: cannot decode: " in message
    assert "mend the images or source.images, then: precompute build" in message
    assert "--run.max_reject_fraction" in message
    assert not (tmp_path / "cache/seal.json").exists()
    assert build(run__max_reject_fraction=0.5) == 0


def test_missing_images_fail_the_build_before_anything_is_encoded(build, tmp_path, capsys):
    few = write_source(tmp_path / "few", [0, 1])
    assert build(source__images=str(few / "images.zip")) == 1
    message = capsys.readouterr().err
    assert "20 of 22 samples have no image: " in message
    assert f"looked in {few / 'images.zip'}" in message
    assert not list((tmp_path / "cache").rglob("*.parquet"))


@pytest.mark.parametrize("unnamed", [range(SAMPLES), range(2)])
def test_records_that_name_no_image_are_named_and_the_advice_is_for_them(build, source_path, capsys, unnamed):
    chat = source_path / "chat.json"
    records = json.loads(chat.read_text())
    names = {sample_name(number) for number in unnamed}
    for record in records:
        if record["id"] in names:
            del record["image"]
    chat.write_text(json.dumps(records))
    assert build(run__max_reject_fraction=0.01) == 1
    message = capsys.readouterr().err
    assert f"{len(names)} of 22 samples have no image" in message
    assert f"the records of {len(names)} samples name none: sample-000, sample-001" in message
    assert f"Give these records an `image`, or leave them out of {chat}" in message
    assert "source.images" not in message


def test_an_image_that_comes_back_is_said_to_stay_rejected(build, tmp_path, capsys):
    fewer = write_source(tmp_path / "fewer", range(SAMPLES - 1))
    images = str(fewer / "images.zip")
    assert build(source__images=images) == 0
    write_source(tmp_path / "fewer")
    assert build(source__images=images) == 0
    assert "images that were missing and are there now: 1 (sample-021)" in capsys.readouterr().err


def test_a_lost_plan_is_restored_and_a_swapped_one_is_never_followed(build, tmp_path, capsys):
    assert build() == 0
    cache, before = tmp_path / "cache", timeless_files(tmp_path / "cache")
    (cache / "seal.json").unlink()
    for shard in (0, 1):
        (cache / f"commits/{shard:06d}.json").unlink()
    plan = pq.read_table(cache / "plan.parquet")
    uris = plan["uri"].to_pylist()
    uris[0], uris[1] = uris[1], uris[0]
    pq.write_table(plan.set_column(2, "uri", pa.array(uris)), cache / "plan.parquet", row_group_size=8)
    assert build() == 0
    assert "plan.parquet is written again" in capsys.readouterr().err
    assert timeless_files(cache) == before


@pytest.mark.parametrize("name", ["build.json", "latents/zarr.json", "plan.parquet", "seal.json"])
def test_lost_metadata_is_restored(build, tmp_path, name):
    assert build() == 0
    before = timeless_files(tmp_path / "cache")
    (tmp_path / "cache" / name).unlink()
    assert build() == 0
    assert timeless_files(tmp_path / "cache") == before


def test_a_changed_image_in_a_damaged_shard_is_refused_too(build, tmp_path, capsys):
    assert build() == 0
    (tmp_path / "cache/latents/c/0/0/0/0").unlink()
    other = write_source(tmp_path / "other", sample_006=image_bytes(99))
    assert build(source=other) == 1
    assert "1 of 22 images are not the ones encoded: sample-006" in capsys.readouterr().err


def test_a_disk_that_fails_stops_the_build_and_rejects_nothing(build, tmp_path, capsys):
    """Reading /proc/self/mem at its start is a real input/output error."""
    folder = write_source(tmp_path / "folder")
    with zipfile.ZipFile(folder / "images.zip") as archive:
        archive.extractall(folder)
    (folder / "sample-009.png").unlink()
    (folder / "sample-009.png").symlink_to("/proc/self/mem")
    assert build(source=folder, source__images=str(folder)) == 1
    assert "Input/output error" in capsys.readouterr().err
    assert not (tmp_path / "cache/seal.json").exists()
    (folder / "sample-009.png").unlink()
    (folder / "sample-009.png").write_bytes(image_bytes(9))
    assert build(source=folder, source__images=str(folder)) == 0
    assert open_cache(tmp_path / "cache").seal.rejected == len(BROKEN)


def test_a_folder_of_images_is_a_source(tmp_path, vae_path):
    images = tmp_path / "images"
    images.mkdir()
    for number in range(3):
        Image.new("RGB", (20, 20), (80 * number, 0, 0)).save(images / f"{number}.png")
    (images / "1.txt").write_text("a dark red square")
    values = config_values(tmp_path / "cache", tmp_path, vae_path)
    values["source"] = {"kind": "folder", "path": str(images)}
    assert main(["build", "--config", str(write_config(tmp_path / "b.yaml", values))]) == 0
    rows = open_cache(tmp_path / "cache").samples(np.arange(3)).to_pylist()
    assert rows[1]["conversations"][1]["value"] == "a dark red square"


def test_a_foreign_folder_is_never_built_into(build, tmp_path, capsys):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.tex").write_text("precious")
    assert build() == 2
    assert "holds 'thesis.tex' but no cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        ({"image__height": 33}, 2, "must be multiples of 8"),
        ({"image__fit": "stretch"}, 2, "fit"),
        ({"image__height": 8, "image__width": 8 * 2**16 + 8}, 2, "no cache can hold 22 samples of this size"),
        ({"image__height": 80_000, "image__width": 80_000}, 2, "bytes a sample, more than 1,073,741,824"),
        ({"image__heigth": 32}, 2, "image.heigth"),
        ({"store__samples_per_shard": 0}, 2, "store.samples_per_shard must be in [1,"),
        ({"run__max_reject_fraction": 2.0}, 2, "run.max_reject_fraction must be in"),
        ({"encoder__model": "/nowhere/vae"}, 2, "/nowhere/vae"),
        ({"encoder__device": "cuda:99"}, 2, "encoder.device"),
        ({"source__path": "/nowhere/chat.json"}, 2, "source.path: /nowhere/chat.json does not exist"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(build, tmp_path, capsys, overrides, code, message):
    assert build(**overrides) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("cache", "message"), [("", "cache: the name is empty"), ("s3://b/c", "s3://b/c is a URL")])
def test_a_name_that_can_be_no_folder_is_refused(source_path, vae_path, tmp_path, capsys, monkeypatch, cache, message):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    config = write_config(tmp_path / "build.yaml", config_values(tmp_path / "cache", source_path, vae_path))
    assert main(["build", "--config", str(config), "--cache", cache]) == 2
    assert message in capsys.readouterr().err
    assert not list(Path.cwd().iterdir())


def test_a_host_without_a_compiler_is_told_so_before_a_cache_is_begun(tmp_path, source_path, vae_path):
    config = write_config(tmp_path / "b.yaml", config_values(tmp_path / "cache", source_path, vae_path))
    done = subprocess.run(
        [sys.executable, "-m", "precompute", "build", "--config", str(config), "--encoder.compile", "true"],
        env={**os.environ, "CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("precompute: error: encoder.compile: torch.compile does not work here")
    assert "install a C++ compiler" in line
    assert not (tmp_path / "cache").exists()


def test_a_build_refused_at_once_leaves_no_litter(build, tmp_path):
    few = write_source(tmp_path / "few", [0, 1])
    (tmp_path / "cache").mkdir()
    for cache in (tmp_path / "cache", tmp_path / "new/folders/cache"):
        assert build(cache=cache, source__images=str(few / "images.zip")) == 1
    assert not list((tmp_path / "cache").iterdir())
    assert not (tmp_path / "new").exists()


def test_a_finished_cache_holds_nothing_but_itself(build, tmp_path):
    assert build() == 0
    expected = {"build.json", "commits", "latents", "plan.parquet", "samples", "seal.json", "zarr.json"}
    assert {path.name for path in (tmp_path / "cache").iterdir()} == expected


@pytest.mark.parametrize("also", [[], ["seal.json"], ["plan.parquet"], ["latents/zarr.json", "build.json"]])
def test_a_spec_that_is_missing_is_restored(build, tmp_path, also):
    assert build() == 0
    cache, before = tmp_path / "cache", timeless_files(tmp_path / "cache")
    for name in ("zarr.json", *also):
        (cache / name).unlink()
    assert build() == 0
    assert timeless_files(cache) == before


def test_a_flipped_digit_of_the_plans_digest_is_mended_before_the_cache_is_sealed_too(build, tmp_path):
    assert build() == 0
    cache = tmp_path / "cache"
    before = timeless_files(cache)
    (cache / "seal.json").unlink()
    text = (cache / "zarr.json").read_text()
    place = text.index('"plan_digest"') + len('"plan_digest": "') + 3
    (cache / "zarr.json").write_text(text[:place] + ("0" if text[place] != "0" else "1") + text[place + 1 :])
    assert build() == 0
    assert timeless_files(cache) == before


def test_a_missing_spec_of_another_recipe_is_not_made_up(build, tmp_path, capsys):
    assert build() == 0
    (tmp_path / "cache/zarr.json").unlink()
    before = timeless_files(tmp_path / "cache")
    assert build(image__height=40) == 1
    message = capsys.readouterr().err
    assert "array.image.height 32 40" in table_rows(message)
    assert timeless_files(tmp_path / "cache") == before


def table_rows(message: str) -> list[str]:
    """The table of a refusal, each row's cells one space apart; what follows it are sentences."""
    lines = [" ".join(line.split()) for line in message.splitlines()]
    start = lines.index("field in the cache now")
    return [line for line in lines[start:] if "precompute" not in line and "command" not in line]


def with_another_caption(source: Path, name: str) -> None:
    records = json.loads((source / "chat.json").read_text())
    (record,) = [each for each in records if each["id"] == name]
    record["conversations"][1]["value"] = "Another text."
    (source / "chat.json").write_text(json.dumps(records))


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        (["zarr.json"], f"image name or text {sample_name(9)} changed"),
        (["plan.parquet"], "samples of shard 1 "),
        (["zarr.json", "plan.parquet"], "samples of shard 1 "),
    ],
)
def test_another_caption_is_refused_though_plan_or_spec_are_lost(build, tmp_path, source_path, capsys, lost, named):
    """By id where the plan is there; else by shard, as records hold a digest of their samples."""
    assert build() == 0
    for name in lost:
        (tmp_path / "cache" / name).unlink()
    before = timeless_files(tmp_path / "cache")
    with_another_caption(source_path, sample_name(9))
    assert build() == 1
    message = capsys.readouterr().err
    assert table_rows(message)[-1].startswith(named)
    assert timeless_files(tmp_path / "cache") == before


def test_a_shard_of_samples_with_other_texts_is_built_again(build, tmp_path, source_path, capsys):
    """Nothing else tells: recipe, images and latents are the same, and a cache without a seal knows no contents."""
    assert build() == 0
    cache, before = tmp_path / "cache", timeless_files(tmp_path / "cache")
    captions = (source_path / "chat.json").read_bytes()
    with_another_caption(source_path, sample_name(9))
    assert build(cache=tmp_path / "other") == 0
    (source_path / "chat.json").write_bytes(captions)
    (cache / "seal.json").unlink()
    for name in ("commits/000001.json", "samples/000001.parquet"):
        (cache / name).write_bytes((tmp_path / "other" / name).read_bytes())
    capsys.readouterr()
    assert build() == 0
    assert "commits/000001.json: was made for other samples" in capsys.readouterr().err
    assert timeless_files(cache) == before


def test_a_build_that_caches_nothing_says_why_with_an_example_of_each_reason(build, tmp_path, capsys):
    nothing = {sample_name(number).replace("-", "_"): b"no image" for number in range(SAMPLES)}
    nothing["sample_001"] = image_bytes(1)[:60]
    source = write_source(tmp_path / "broken", **nothing)
    for _ in range(2):
        assert build(source=source, run__max_reject_fraction=1.0) == 1
        message = capsys.readouterr().err
        assert "none of 22 samples could be cached, so there is nothing to seal" in message
        assert "cannot decode  22       sample-000: cannot decode: " in message
        assert "--retry-rejected" in message
        assert "Traceback" not in message


def test_the_cache_remembers_what_it_was_built_from(build, tmp_path, vae_path):
    assert build() == 0
    config = json.loads((tmp_path / "cache/build.json").read_text())["config"]
    assert config["encoder"]["model"] == str(vae_path)
    assert "run" not in config
