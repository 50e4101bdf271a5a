"""A spec that is lost, beside a seal that is another cache's: mended, or refused in words that help when followed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_store.cli import main as cache_store
from cache_store.verify.verify import verify
from precompute.cli import main
from tests.precompute.conftest import (
    config_values,
    image_bytes,
    make_vae,
    sample_name,
    timeless_files,
    write_config,
    write_source,
)

SAMPLES = 12
"""In shards of 8."""

Build = Callable[..., int]


@pytest.fixture
def build(tmp_path: Path, vae_path: Path) -> Build:
    """Build from `source`, which changes as a user's does, with a copy of the weights; returns the exit code."""
    shutil.copytree(vae_path, tmp_path / "model")
    write_source(tmp_path / "source", range(SAMPLES))

    def run(*flags: str, cache: str = "cache", **overrides: object) -> int:
        values = config_values(tmp_path / cache, tmp_path / "source", tmp_path / "model", **overrides)
        return main(["build", "--config", str(write_config(tmp_path / f"{cache}.yaml", values)), *flags])

    return run


@pytest.fixture
def cache(build: Build, tmp_path: Path) -> Path:
    assert build() == 0
    return tmp_path / "cache"


def seal_of_another_recipe(build: Build, tmp_path: Path) -> None:
    assert build(cache="other", image__height=40) == 0


def seal_of_fewer_samples(build: Build, tmp_path: Path) -> None:
    write_source(tmp_path / "source", range(8))
    assert build(cache="other") == 0
    write_source(tmp_path / "source", range(SAMPLES))


LOST = [
    [],
    ["plan.parquet"],
    ["build.json", "latents/zarr.json"],
    ["commits/000000.json"],
    ["samples/000001.parquet"],
]


@pytest.mark.parametrize(
    ("make_other", "lost"), [(seal_of_another_recipe, each) for each in LOST] + [(seal_of_fewer_samples, [])]
)
def test_a_lost_spec_is_restored_beside_the_seal_of_another_cache(build, cache, tmp_path, capsys, make_other, lost):
    before = timeless_files(cache)
    make_other(build, tmp_path)
    shutil.copy(tmp_path / "other/seal.json", cache)
    for name in ("zarr.json", *lost):
        (cache / name).unlink()
    capsys.readouterr()
    assert build() == 0
    assert ("plan.parquet is written again" in capsys.readouterr().err) is ("plan.parquet" in lost)
    assert timeless_files(cache) == before
    assert not verify(cache, "full").findings


def test_a_lost_spec_is_restored_beside_the_seal_from_before_an_extension(build, cache, tmp_path):
    shutil.copy(cache / "seal.json", tmp_path)
    write_source(tmp_path / "source", range(SAMPLES + 9))
    assert build("--extend") == 0
    before = timeless_files(cache)
    shutil.copy(tmp_path / "seal.json", cache)
    (cache / "zarr.json").unlink()
    assert build() == 0
    assert timeless_files(cache) == before


def test_a_lost_spec_is_restored_where_seal_and_plan_are_lost_too(build, cache):
    before = timeless_files(cache)
    for name in ("zarr.json", "seal.json", "plan.parquet"):
        (cache / name).unlink()
    assert build() == 0
    assert timeless_files(cache) == before


def test_the_steps_that_verification_names_end_in_a_sound_cache(build, cache, tmp_path):
    """Also where spec and seal are both not this cache's."""
    before, report = timeless_files(cache), str(tmp_path / "report.json")
    seal_of_another_recipe(build, tmp_path)
    shutil.copy(tmp_path / "other/seal.json", cache)
    (cache / "zarr.json").unlink()
    assert cache_store(["verify", str(cache), "--report", report]) == 1
    assert json.loads(Path(report).read_text())["next"][0] == f"precompute repair {cache} --report {report}"
    assert main(["repair", str(cache), "--report", report]) == 0
    assert timeless_files(cache) == before


def test_a_seal_of_what_is_asked_makes_the_cache_no_other_one(build, cache, tmp_path, capsys):
    """The seal came from elsewhere; spec, plan and shards say what the cache is."""
    seal_of_another_recipe(build, tmp_path)
    shutil.copy(tmp_path / "other/seal.json", cache)
    before = timeless_files(cache)
    assert build(image__height=40) == 1
    assert "was made from other inputs; it is untouched" in capsys.readouterr().err
    assert timeless_files(cache) == before


@pytest.mark.parametrize("foreign_seal", [False, True])
def test_records_restore_a_lost_spec_where_another_config_cannot(build, cache, tmp_path, capsys, foreign_seal):
    before = timeless_files(cache)
    if foreign_seal:
        seal_of_another_recipe(build, tmp_path)
        shutil.copy(tmp_path / "other/seal.json", cache)
    (cache / "zarr.json").unlink()
    assert build(image__width=48) == 1
    assert "array.image.width  40            48" in capsys.readouterr().err
    assert not (cache / "zarr.json").exists()
    assert main(["repair", str(cache), "--report", report_on(cache, tmp_path)]) == 0
    assert timeless_files(cache) == before


def report_on(cache: Path, folder: Path) -> str:
    assert cache_store(["verify", str(cache), "--report", str(folder / "report.json")]) == 1
    return str(folder / "report.json")


def other_text(tmp_path: Path) -> None:
    chat = tmp_path / "source/chat.json"
    chat.write_text(chat.read_text().replace("Picture 3.", "Picture three."))


def other_weights(tmp_path: Path) -> None:
    make_vae(tmp_path / "model", seed=1)


@pytest.mark.parametrize("change", [other_text, other_weights])
def test_what_has_changed_where_a_spec_is_lost_is_to_be_restored(build, cache, tmp_path, vae_path, capsys, change):
    before = timeless_files(cache)
    (cache / "zarr.json").unlink()
    change(tmp_path)
    assert build() == 1
    message = capsys.readouterr().err
    assert "restore what it was made from and run the same command again" in message
    assert "remembers" not in message
    write_source(tmp_path / "source", range(SAMPLES))
    shutil.copytree(vae_path, tmp_path / "model", dirs_exist_ok=True)
    assert build() == 0
    assert timeless_files(cache) == before


def test_a_list_that_has_grown_since_the_spec_was_lost_is_refused(build, cache, tmp_path, capsys):
    before = timeless_files(cache)
    (cache / "zarr.json").unlink()
    write_source(tmp_path / "source", range(SAMPLES + 1), sample_003=image_bytes(3))
    assert build() == 1
    message = capsys.readouterr().err
    assert f"new sample {sample_name(SAMPLES)}" in " ".join(message.split())
    assert "--extend" in message
    write_source(tmp_path / "source", range(SAMPLES))
    assert build() == 0
    assert timeless_files(cache) == before
