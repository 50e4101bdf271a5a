"""`precompute repair`: from a report back to the same bytes."""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cache_store.cli import main as cache_store
from cache_store.verify.verify import verify
from precompute.cli import main as precompute
from precompute.encode.engines.local import ENCODER_THREADS
from tests.precompute.conftest import config_values, flip, image_bytes, timeless_files, write_config, write_source


@pytest.fixture
def cache(tmp_path: Path, source_path: Path, vae_path: Path) -> Path:
    values = config_values(tmp_path / "cache", source_path, vae_path)
    assert precompute(["build", "--config", str(write_config(tmp_path / "build.yaml", values))]) == 0
    return tmp_path / "cache"


DAMAGED = (
    "latents/c/1/0/0/0",
    "samples/000002.parquet",
    "commits/000000.json",
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
    assert precompute(["repair", str(tmp_path), "--shards", "0"]) == 2
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
    assert f"the report is not one of {cache} as it is" in message
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


def edit(path: Path) -> None:
    """Another digit in a record's time."""
    seconds = re.compile(rb'(?<="seconds":)\d')
    path.write_bytes(seconds.sub(lambda digit: b"%d" % (9 - int(digit[0])), path.read_bytes()))


HIDING = [
    ("samples/000001.parquet", flip),
    ("samples/000001.parquet", Path.unlink),
    ("commits/000001.json", edit),
    ("commits/000001.json", Path.unlink),
]
"""Damage behind which nothing that can be trusted remembers the images of shard 1."""

ANOTHER = {"sample_009": image_bytes(99)}


@pytest.mark.parametrize(("name", "damage"), HIDING)
def test_a_shard_that_comes_out_another_one_is_left_as_it_was(cache, source_path, capsys, name, damage):
    """The seal says what it was, and stays."""
    before = timeless_files(cache)
    damage(cache / name)
    damaged = shard_files(cache, 1)
    write_source(source_path, **ANOTHER)
    for _ in range(2):
        assert precompute(["repair", str(cache), "--shards", "[0, 1]"]) == 1
        assert_named(capsys, by_table=damage is not Path.unlink or name.startswith("commits/"))
        assert shard_files(cache, 1) == damaged
        assert timeless_files(cache).keys() >= before.keys() - {name}
    write_source(source_path)
    assert precompute(["repair", str(cache), "--shards", "1"]) == 0
    assert timeless_files(cache) == before


def assert_named(capsys: pytest.CaptureFixture[str], by_table: bool) -> None:
    """The shard is; the sample is where its samples table can be read."""
    message = capsys.readouterr().err
    assert "1 shards built again do not come out as they were, so that nothing of them was replaced: 1\n" in message
    assert ("image of sample-009" in message) is by_table
    assert ("an image may have changed unseen" in message) is not by_table
    assert "Traceback" not in message


def shard_files(cache: Path, shard: int) -> dict[str, bytes]:
    """The shard's files and record, and what the whole cache stands on."""
    names = (f"latents/c/{shard}/0/0/0", f"shards/{shard:06d}.tar", f"samples/{shard:06d}.parquet")
    names = (*names, f"commits/{shard:06d}.json", "seal.json", "plan.parquet", "zarr.json")
    return {name: (cache / name).read_bytes() for name in names if (cache / name).exists()}


@contextmanager
def two_workers() -> Iterator[None]:
    """Threads enough that a repair on a CPU takes two processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2 * ENCODER_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def test_two_workers_leave_such_a_shard_of_tars_and_repair_the_others(tmp_path, source_path, vae_path, capsys):
    cache = tmp_path / "cache"
    values = config_values(cache, source_path, vae_path, store__format="webdataset")
    assert precompute(["build", "--config", str(write_config(tmp_path / "build.yaml", values))]) == 0
    before = timeless_files(cache)
    edit(cache / "commits/000001.json")
    flip(cache / "shards/000002.tar")
    damaged = shard_files(cache, 1)
    write_source(source_path, **ANOTHER)
    with two_workers():
        assert precompute(["repair", str(cache), "--shards", "[1, 2]"]) == 1
    assert_named(capsys, by_table=True)
    assert shard_files(cache, 1) == damaged
    assert timeless_files(cache) == before
    write_source(source_path)
    assert precompute(["repair", str(cache), "--shards", "1"]) == 0
    assert not verify(cache, "full").findings
    assert timeless_files(cache) == before


def rerun(tmp_path: Path, *options: str) -> list[str]:
    """The build that made the cache, again."""
    return ["build", "--config", str(tmp_path / "build.yaml"), *options]


@pytest.mark.parametrize("options", [(), ("--retry-rejected",), ("--extend",)])
@pytest.mark.parametrize(("name", "damage"), [each for each in HIDING if each[1] is not flip])
def test_a_build_that_is_run_again_holds_a_sealed_cache_to_its_seal(
    cache, tmp_path, source_path, capsys, name, damage, options
):
    """Damage is no change of inputs: the cache stays the one that it was, for a rerun every night too."""
    before = timeless_files(cache)
    damage(cache / name)
    damaged = shard_files(cache, 1)
    write_source(source_path, **ANOTHER)
    for _ in range(2):
        assert precompute(rerun(tmp_path, *options)) == 1
        assert_named(capsys, by_table=damage is not Path.unlink or name.startswith("commits/"))
        assert shard_files(cache, 1) == damaged
    write_source(source_path)
    assert precompute(rerun(tmp_path, *options)) == 0
    assert "identity was" not in capsys.readouterr().err
    assert timeless_files(cache) == before


def test_a_build_of_a_cache_without_a_seal_holds_a_shard_to_its_own_record(cache, tmp_path, source_path, capsys):
    before = timeless_files(cache)
    (cache / "seal.json").unlink()
    (cache / "samples/000001.parquet").unlink()
    write_source(source_path, **ANOTHER)
    assert precompute(rerun(tmp_path)) == 1
    assert f"delete commits/000001.json in {cache}, then precompute build" in capsys.readouterr().err
    write_source(source_path)
    assert precompute(rerun(tmp_path)) == 0
    assert timeless_files(cache) == before


@pytest.mark.parametrize("command", ["repair", "build"])
def test_what_was_refused_can_be_taken_as_another_cache(cache, tmp_path, source_path, capsys, command):
    """In the way that the message says."""
    flip(cache / "latents/c/1/0/0/0")
    (cache / "samples/000001.parquet").unlink()
    write_source(source_path, **ANOTHER)
    assert precompute(["repair", str(cache), "--shards", "1"] if command == "repair" else rerun(tmp_path)) == 1
    names = ("seal.json", "commits/000001.json")
    assert f"delete {', '.join(names)} in {cache}, then precompute build --config" in capsys.readouterr().err
    for name in names:
        (cache / name).unlink()
    assert precompute(rerun(tmp_path)) == 0
    assert not verify(cache, "full").findings


def test_a_repair_that_stops_halfway_has_forgotten_nothing(cache, source_path, at_second_batch, capsys):
    """The next one refuses another image as this one would have."""
    before = timeless_files(cache)
    (cache / "samples/000001.parquet").unlink()
    damaged = shard_files(cache, 1)
    at_second_batch.append(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert precompute(["repair", str(cache), "--shards", "1"]) == 3
    assert shard_files(cache, 1) == damaged
    write_source(source_path, **ANOTHER)
    assert precompute(["repair", str(cache), "--shards", "1"]) == 1
    assert_named(capsys, by_table=False)
    write_source(source_path)
    assert precompute(["repair", str(cache), "--shards", "1"]) == 0
    assert timeless_files(cache) == before


def test_without_a_seal_a_shards_own_record_says_what_it_was(cache, source_path, capsys):
    before = timeless_files(cache)
    (cache / "seal.json").unlink()
    (cache / "samples/000001.parquet").unlink()
    damaged = shard_files(cache, 1)
    write_source(source_path, **ANOTHER)
    assert precompute(["repair", str(cache), "--shards", "1"]) == 1
    assert_named(capsys, by_table=False)
    assert shard_files(cache, 1) == damaged
    write_source(source_path)
    assert precompute(["repair", str(cache), "--shards", "1"]) == 0
    assert timeless_files(cache) == before


@pytest.fixture
def foreign(tmp_path: Path, vae_path: Path) -> Path:
    """A cache of the same spec from another image in each shard, such as another machine would make."""
    source = write_source(
        tmp_path / "other-source", **{f"sample_{each:03d}": image_bytes(90 + each) for each in (1, 9, 17)}
    )
    values = config_values(tmp_path / "foreign", source, vae_path)
    assert precompute(["build", "--config", str(write_config(tmp_path / "foreign.yaml", values))]) == 0
    return tmp_path / "foreign"


@pytest.mark.parametrize("shards", ["1", "[0, 1, 2]"])
def test_a_foreign_seal_is_replaced_and_the_shards_are_not_blamed(cache, foreign, capsys, shards):
    before = timeless_files(cache)
    shutil.copy(foreign / "seal.json", cache)
    assert precompute(["repair", str(cache), "--shards", shards]) == 0
    message = capsys.readouterr().err
    assert "the seal was not that of these shards" in message
    assert "other bytes" not in message
    assert timeless_files(cache) == before


def test_a_foreign_shard_that_nobody_named_is_repaired_rather_than_sealed(cache, foreign):
    before = timeless_files(cache)
    for name in shard_files(cache, 2).keys() - {"seal.json", "plan.parquet", "zarr.json"}:
        shutil.copy(foreign / name, cache / name)
    write_again = cache / "latents/c/1/0/0/0"
    flip(write_again)
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


@pytest.mark.parametrize("program", [["repair", "--shards", "1"], ["audit"]])
def test_what_lies_elsewhere_now_is_told_with_the_way_to_say_so(
    cache, source_path, vae_path, tmp_path, capsys, program
):
    name, *options = program
    source_path.rename(tmp_path / "elsewhere")
    assert precompute([name, str(cache), *options]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("precompute: error")]
    assert (
        f"does not exist. So {cache / 'build.json'} remembers it; if it has moved, run the `precompute build`" in line
    )
    values = config_values(cache, tmp_path / "elsewhere", vae_path)
    assert precompute(["build", "--config", str(write_config(tmp_path / "moved.yaml", values))]) == 0
    assert precompute([name, str(cache), *options]) == 0
