"""`precompute repair`: from a report back to the same bytes."""

import shutil
from pathlib import Path

import pytest

from cache_store.cli import main as cache_store
from cache_store.verify import verify
from precompute.cli import main as precompute
from tests.precompute.conftest import config_values, image_bytes, timeless_files, write_config, write_source


@pytest.fixture
def cache(tmp_path: Path, source_path: Path, vae_path: Path) -> Path:
    values = config_values(tmp_path / "cache", source_path, vae_path)
    assert precompute(["build", "--config", str(write_config(tmp_path / "build.yaml", values))]) == 0
    return tmp_path / "cache"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGED = (
    "latents/c/1/0/0/0",
    "samples/000002.parquet",
    "commits/latents/000000.json",
    "plan.parquet",
    "seal.json",
    "latents/zarr.json",
    "zarr.json",
)


@pytest.mark.parametrize("damage", [flip, Path.unlink])
@pytest.mark.parametrize("name", DAMAGED)
def test_what_verify_names_is_repaired_to_the_same_bytes(cache, tmp_path, name, damage):
    before, untouched = timeless_files(cache), times_of_other_shards(cache, name)
    damage(cache / name)
    report = tmp_path / "report.json"
    assert cache_store(["verify", str(cache), "--level", "full", "--report", str(report)]) == 1
    assert precompute(["repair", str(cache), "--report", str(report)]) == 0
    assert timeless_files(cache) == before
    assert not verify(cache, "full").findings
    assert times_of_other_shards(cache, name) == untouched


def times_of_other_shards(cache: Path, name: str) -> dict[int, int]:
    """Modification times of the shards that the damaged file does not belong to."""
    others = [shard for shard in range(3) if f"c/{shard}/" not in name and f"{shard:06d}." not in name]
    return {shard: (cache / f"latents/c/{shard}/0/0/0").stat().st_mtime_ns for shard in others}


def test_a_damaged_spec_is_mended_by_a_build(cache, tmp_path):
    before = timeless_files(cache)
    flip(cache / "zarr.json")
    assert precompute(["build", "--config", str(tmp_path / "build.yaml")]) == 0
    assert timeless_files(cache) == before


@pytest.mark.parametrize("shards", ["1", "[1]"])
def test_shards_can_be_named_by_hand(cache, shards):
    before = timeless_files(cache)
    flip(cache / "latents/c/1/0/0/0")
    assert precompute(["repair", str(cache), "--shards", shards]) == 0
    assert timeless_files(cache) == before


def test_a_cache_built_from_relative_paths_is_repaired_from_any_folder(tmp_path, source_path, vae_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = config_values(Path("cache"), source_path.relative_to(tmp_path), vae_path)
    assert precompute(["build", "--config", str(write_config(tmp_path / "relative.yaml", values))]) == 0
    before = timeless_files(tmp_path / "cache")
    flip(tmp_path / "cache/latents/c/1/0/0/0")
    monkeypatch.chdir("/")
    assert precompute(["repair", str(tmp_path / "cache"), "--shards", "1"]) == 0
    assert timeless_files(tmp_path / "cache") == before


def test_a_folder_without_a_cache_is_not_repaired(tmp_path, capsys):
    assert precompute(["repair", str(tmp_path), "--shards", "0"]) == 1
    assert "holds no cache" in capsys.readouterr().err


def test_sources_that_changed_meanwhile_stop_the_repair_by_name(cache, source_path, capsys):
    write_source(source_path, sample_009=image_bytes(99))
    flip(cache / "latents/c/1/0/0/0")
    damaged = timeless_files(cache)
    assert precompute(["repair", str(cache), "--shards", "[1]"]) == 1
    assert "1 of 22 images are not the ones encoded: sample-009" in capsys.readouterr().err
    assert timeless_files(cache) == damaged


def test_a_report_of_another_cache_is_refused_and_nothing_is_touched(cache, tmp_path, vae_path, capsys):
    other = config_values(tmp_path / "other", tmp_path / "source", vae_path, store__samples_per_shard=6)
    assert precompute(["build", "--config", str(write_config(tmp_path / "other.yaml", other))]) == 0
    flip(tmp_path / "other/latents/c/3/0/0/0")
    report = tmp_path / "report.json"
    assert cache_store(["verify", str(tmp_path / "other"), "--level", "full", "--report", str(report)]) == 1
    flip(cache / "latents/c/1/0/0/0")
    damaged = timeless_files(cache)
    assert precompute(["repair", str(cache), "--report", str(report)]) == 1
    message = capsys.readouterr().err
    assert f"{report} is not a report of {cache} as it is" in message
    assert f"cache-store verify {cache} --level full --report FILE" in message
    assert timeless_files(cache) == damaged


def test_a_cache_that_was_moved_is_repaired_by_the_report_of_its_old_place(cache, tmp_path):
    before = timeless_files(cache)
    flip(cache / "latents/c/1/0/0/0")
    report = tmp_path / "report.json"
    assert cache_store(["verify", str(cache), "--level", "full", "--report", str(report)]) == 1
    moved = cache.rename(tmp_path / "moved")
    assert precompute(["repair", str(moved), "--report", str(report)]) == 0
    assert timeless_files(moved) == before


def test_a_changed_image_behind_a_damaged_samples_table_is_no_repair(cache, tmp_path, source_path, capsys):
    """Nothing remembers the image any more; the seal still says what the shard was."""
    before = timeless_files(cache)
    write_source(source_path, sample_009=image_bytes(99))
    flip(cache / "samples/000001.parquet")
    for _ in range(2):
        assert precompute(["repair", str(cache), "--shards", "[0, 1]"]) == 1
        assert "1 shards built again did not come out as they were sealed" in capsys.readouterr().err
        now = timeless_files(cache)
        assert now == {name: data for name, data in before.items() if name in now}
        assert before.keys() - now.keys() == {"latents/c/1/0/0/0", "samples/000001.parquet"}
    shutil.copytree(cache, tmp_path / "taken")
    assert precompute(["build", "--config", str(tmp_path / "build.yaml"), "--cache", str(tmp_path / "taken")]) == 0
    assert "rebuilt shards have other bytes" in capsys.readouterr().err
    write_source(source_path)
    assert precompute(["repair", str(cache), "--shards", "1"]) == 0
    assert timeless_files(cache) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name what to repair"),
        (["--shards", "[7]"], "has shards [0, 3); it has no shard 7"),
        (["--report", "/nowhere.json"], "is not a report"),
        (["--report", __file__], "is not a report"),
    ],
)
def test_a_mistake_is_one_line(cache, capsys, options, message):
    assert precompute(["repair", str(cache), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
