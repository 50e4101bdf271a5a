"""A build whose shards are tars: the latents of a Zarr build, and its promises."""

import os
import signal
import tarfile
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cli import main as cache_store
from cache_store.verify.verify import verify
from precompute.cli import main
from tests.precompute.conftest import BROKEN, SAMPLES, config_values, timeless_files, write_config
from tests.precompute.processes import start_building


@pytest.fixture
def build(tmp_path: Path, source_path: Path, vae_path: Path):
    """Build a cache of this name; returns its folder."""

    def run(name: str, **overrides: object) -> Path:
        values = config_values(tmp_path / name, source_path, vae_path, **overrides)
        assert main(["build", "--config", str(write_config(tmp_path / "build.yaml", values))]) == 0
        return tmp_path / name

    return run


def test_both_forms_of_a_build_hold_the_same_latents_and_convert_into_each_other(build, tmp_path):
    tars, zarr = build("tars", store__format="webdataset"), build("zarr")
    numbers = np.arange(SAMPLES - len(BROKEN))
    np.testing.assert_array_equal(open_cache(tars).read(numbers), open_cache(zarr).read(numbers), strict=True)
    assert not verify(tars, "full").findings
    assert cache_store(["convert", str(zarr), str(tmp_path / "converted"), "--format", "webdataset"]) == 0
    assert timeless_files(tmp_path / "converted") == timeless_files(tars)


def test_a_rejected_sample_has_no_member(build):
    tars = build("tars", store__format="webdataset")
    names = []
    for path in sorted((tars / "shards").iterdir()):
        with tarfile.open(path) as archive:
            names += archive.getnames()
    rows = [row for row in range(SAMPLES) if row not in BROKEN]
    assert names == [f"{row:012d}.{kind}" for row in rows for kind in ("latent.npy", "json")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_build_of_tars_resumes_to_identical_bytes(build, tmp_path, source_path, vae_path, number):
    overrides = {"store__format": "webdataset", "store__samples_per_shard": 1}
    expected = timeless_files(build("undisturbed", **overrides))
    process, arguments = start_building(tmp_path, config_values(tmp_path / "cache", source_path, vae_path, **overrides))
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode == (3 if number == signal.SIGTERM else -number)
    assert not (tmp_path / "cache/seal.json").exists()
    assert main(arguments) == 0
    assert timeless_files(tmp_path / "cache") == expected


def test_repair_writes_a_damaged_tar_again_byte_by_byte(build, tmp_path):
    tars = build("tars", store__format="webdataset")
    before = timeless_files(tars)
    shard = tars / "shards/000001.tar"
    shard.write_bytes(shard.read_bytes()[:-512])
    report = tmp_path / "report.json"
    assert cache_store(["verify", str(tars), "--level", "full", "--report", str(report)]) == 1
    assert main(["repair", str(tars), "--report", str(report)]) == 0
    assert timeless_files(tars) == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"store__codec": "zstd"}, "store.format webdataset: tars hold latents as they are"),
        ({"store__dtype": "bfloat16"}, "store.format webdataset: tars hold dtype float16 or float32"),
    ],
)
def test_what_tars_cannot_hold_is_refused_in_one_line(tmp_path, source_path, vae_path, capsys, overrides, message):
    values = config_values(tmp_path / "cache", source_path, vae_path, store__format="webdataset", **overrides)
    assert main(["build", "--config", str(write_config(tmp_path / "b.yaml", values))]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "cache").exists()
