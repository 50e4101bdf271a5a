"""`precompute build --retry-rejected` and `--check-sources`: what the images are now."""

import errno
import os
import shutil
import signal
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cache_store import open_cache
from cache_store.cache.metadata import read_seal, write_commit
from cache_store.format.schema import CommitRecord
from cache_store.verify.verify import verify
from precompute.cli import main
from tests.precompute.conftest import (
    BROKEN,
    SAMPLES,
    config_values,
    image_bytes,
    sample_name,
    timeless_files,
    write_config,
    write_source,
)

MISSING = 18
"""A sample of the last shard, whose file is not there at first; the broken ones lie in the two others."""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of images, of which one is missing and two are broken."""
    folder = write_source(tmp_path / "images")
    with zipfile.ZipFile(folder / "images.zip") as archive:
        archive.extractall(folder)
    image(folder, MISSING).unlink()
    return folder


@pytest.fixture
def build(tmp_path: Path, images: Path, vae_path: Path):
    """Run a build of that folder; returns its exit code."""

    def run(*flags: str, cache: str = "cache") -> int:
        values = config_values(tmp_path / cache, images, vae_path, source__images=str(images))
        return main(["build", "--config", str(write_config(tmp_path / f"{cache}.yaml", values)), *flags])

    return run


def image(folder: Path, number: int) -> Path:
    return folder / f"{sample_name(number)}.png"


def mend(folder: Path, *numbers: int) -> None:
    for number in numbers:
        image(folder, number).write_bytes(image_bytes(number))


def times(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}


def latents(cache: Path) -> dict[str, np.ndarray]:
    opened = open_cache(cache)
    numbers = np.arange(len(opened))
    return dict(zip(opened.samples(numbers, ["id"])["id"].to_pylist(), opened.read(numbers), strict=True))


def test_samples_that_can_be_read_now_are_recovered_and_their_neighbours_keep_their_bytes(
    build, tmp_path, images, capsys
):
    assert build() == 0
    cache, before, earlier = tmp_path / "cache", times(tmp_path / "cache"), latents(tmp_path / "cache")
    mend(images, MISSING, BROKEN[0])
    assert build("--retry-rejected") == 0
    assert "recovered 2 of 3 rejected samples tried again" in capsys.readouterr().out
    after, now = times(cache), latents(cache)
    assert now.keys() - earlier.keys() == {sample_name(MISSING), sample_name(BROKEN[0])}
    assert all(np.array_equal(now[name], earlier[name]) for name in earlier)
    kept = cache / "latents/c/1/0/0/0"
    assert after[kept] == before[kept]
    assert not verify(cache, "full").findings
    capsys.readouterr()
    assert build() == 0
    assert "there now" not in capsys.readouterr().err


def test_without_the_flag_they_stay_rejected_and_it_is_named(build, tmp_path, images, capsys):
    assert build() == 0
    before = times(tmp_path / "cache")
    mend(images, MISSING, BROKEN[0])
    capsys.readouterr()
    assert build() == 0
    message = capsys.readouterr().err
    assert f"images that were missing and are there now: 1 ({sample_name(MISSING)})" in message
    assert f"images that were rejected and have changed: 1 ({sample_name(BROKEN[0])})" in message
    assert message.count("--retry-rejected") == 2
    assert times(tmp_path / "cache") == before


def test_where_nothing_can_be_recovered_nothing_is_touched(build, tmp_path, capsys):
    assert build() == 0
    before = times(tmp_path / "cache")
    assert build("--retry-rejected") == 0
    assert "recovered 0 of 3 rejected samples tried again" in capsys.readouterr().out
    assert times(tmp_path / "cache") == before


def test_a_retry_ends_in_the_cache_of_the_mended_images(build, tmp_path, images):
    """But for the plan's fingerprints and the order of events, which enter no identity."""
    assert build() == 0
    mend(images, MISSING, *BROKEN)
    assert build("--retry-rejected") == 0
    assert build(cache="fresh") == 0
    assert read_seal(tmp_path / "cache").identity == read_seal(tmp_path / "fresh").identity


def test_too_many_rejects_are_mended_by_a_retry(build, tmp_path, images, capsys):
    for number in (1, 2, 3):
        image(images, number).write_bytes(b"no image")
    assert build() == 1
    assert "--retry-rejected" in capsys.readouterr().err
    mend(images, 1, 2, 3)
    assert build("--retry-rejected") == 0
    assert not verify(tmp_path / "cache", "full").findings


def test_a_repair_of_a_shard_whose_reject_is_another_now_is_refused_by_name(build, tmp_path, images, capsys):
    assert build() == 0
    before = timeless_files(tmp_path / "cache")
    mend(images, BROKEN[0])
    assert main(["repair", str(tmp_path / "cache"), "--shards", "[0]"]) == 1
    message = capsys.readouterr().err
    assert f"have changed: {sample_name(BROKEN[0])}" in message
    assert "--retry-rejected" in message
    assert timeless_files(tmp_path / "cache") == before
    assert main(["repair", str(tmp_path / "cache"), "--shards", "[1]"]) == 0
    assert timeless_files(tmp_path / "cache") == before


def test_a_reject_in_the_shard_that_an_extension_writes_again_is_tried_and_said(build, tmp_path, images, capsys):
    assert build() == 0
    write_source(images, range(24))
    mend(images, MISSING, 22, 23)
    assert build("--extend") == 0
    assert f"in the shard that is written again: 1 ({sample_name(MISSING)})" in capsys.readouterr().err
    seal = read_seal(tmp_path / "cache")
    assert (seal.planned, seal.rejected) == (24, len(BROKEN))


def test_a_retry_that_a_full_disk_stopped_goes_on_with_and_without_the_flag(build, tmp_path, images, monkeypatch):
    """The seal is gone, and one of the two shards is built again; the flag alone brings the other's sample back."""
    assert build() == 0
    mend(images, MISSING, BROKEN[0])
    commits = []

    def fail(root: Path, record: CommitRecord) -> None:
        commits.append(record)
        if len(commits) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root))
        write_commit(root, record)

    with monkeypatch.context() as patched:
        patched.setattr("cache_store.cache.writer.write_commit", fail)
        assert build("--retry-rejected") == 1
    shutil.copytree(tmp_path / "cache", tmp_path / "without")
    assert build("--retry-rejected") == 0
    assert build(cache="without") == 0
    assert build("--retry-rejected", cache="without") == 0
    assert read_seal(tmp_path / "cache").identity == read_seal(tmp_path / "without").identity
    assert read_seal(tmp_path / "cache").rejected == 1


def test_images_with_the_bytes_that_were_encoded_are_said_to_be_so(build, tmp_path, capsys):
    assert build() == 0
    before = times(tmp_path / "cache")
    assert build("--check-sources") == 0
    assert f"{SAMPLES} images were read again; all that are encoded have the bytes" in capsys.readouterr().err
    assert times(tmp_path / "cache") == before


def change_in_secret(path: Path) -> None:
    """Other bytes, of the same size and time."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_an_image_that_looks_the_same_and_is_not_is_found_by_a_check_alone(build, tmp_path, images, capsys):
    assert build() == 0
    before = times(tmp_path / "cache")
    change_in_secret(image(images, 7))
    assert build() == 0
    assert build("--check-sources") == 1
    message = capsys.readouterr().err
    assert "1 of 22 images are not the ones encoded: sample-007" in message
    assert "image of sample-007" in message
    assert times(tmp_path / "cache") == before


@pytest.mark.parametrize(("samples", "flag"), [(SAMPLES, "--retry-rejected"), (SAMPLES + 1, "--extend")])
def test_an_image_that_changed_unseen_is_found_where_its_shard_is_built_again(
    build, tmp_path, images, capsys, samples, flag
):
    assert build() == 0
    write_source(images, range(samples))
    mend(images, MISSING, samples - 1)
    change_in_secret(image(images, MISSING + 1))
    before = times(tmp_path / "cache")
    assert build(flag) == 1
    assert f"1 of 22 images are not the ones encoded: {sample_name(MISSING + 1)}" in capsys.readouterr().err
    assert times(tmp_path / "cache") == before


def test_an_image_that_changed_unseen_stops_the_repair_of_its_shard_and_of_no_other(build, tmp_path, images, capsys):
    assert build() == 0
    cache = tmp_path / "cache"
    before = timeless_files(cache)
    change_in_secret(image(images, 7))
    assert main(["repair", str(cache), "--shards", "0"]) == 1
    assert "1 of 22 images are not the ones encoded: sample-007" in capsys.readouterr().err
    assert main(["repair", str(cache), "--shards", "1"]) == 0
    assert timeless_files(cache) == before


def test_a_check_precedes_the_work_that_is_left(build, tmp_path, images, capsys):
    """Of an unsealed cache: nothing is encoded before it."""
    assert build() == 0
    cache = tmp_path / "cache"
    (cache / "seal.json").unlink()
    (cache / "commits/000002.json").unlink()
    change_in_secret(image(images, 7))
    assert build("--check-sources") == 1
    assert not (cache / "commits/000002.json").exists()
    mend(images, 7)
    assert build("--check-sources") == 0
    assert "16 images were read again" in capsys.readouterr().err


def test_a_retry_that_stops_halfway_has_lost_no_shard(build, tmp_path, images, request):
    """The shard that it was encoding again stays as it was until there is another."""
    assert build() == 0
    before = timeless_files(tmp_path / "cache")
    mend(images, BROKEN[0])
    request.getfixturevalue("at_second_batch").append(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert build("--retry-rejected") == 3
    assert len(list((tmp_path / "cache/commits").iterdir())) == 3
    assert build() == 0
    assert timeless_files(tmp_path / "cache") == before


@pytest.mark.parametrize("name", ["samples/000001.parquet", "commits/000001.json"])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_check_names_shards_whose_images_nothing_remembers(build, tmp_path, images, capsys, name, sealed):
    assert build() == 0
    cache = tmp_path / "cache"
    if not sealed:
        (cache / "seal.json").unlink()
    (cache / name).write_bytes(bytes(reversed((cache / name).read_bytes())))
    before = times(cache)
    assert build("--check-sources") == 1
    message = capsys.readouterr().err
    assert "what the images of 1 shards were cannot be told" in message
    assert f"first run precompute repair {cache} --shards '[1]'" in message
    assert times(cache) == before
    assert main(["repair", str(cache), "--shards", "[1]"]) == 0
    assert build("--check-sources") == 0
    assert "22 images were read again" in capsys.readouterr().err


def test_an_image_that_is_gone_is_found_by_a_check(build, images, capsys):
    assert build() == 0
    image(images, 7).unlink()
    assert build("--check-sources") == 1
    assert "missing" in capsys.readouterr().err


def test_a_damaged_shard_that_none_is_recovered_in_is_held_to_what_it_was(build, tmp_path, images, capsys):
    assert build() == 0
    cache = tmp_path / "cache"
    before = timeless_files(cache)
    (cache / "samples/000001.parquet").unlink()
    mend(images, MISSING)
    image(images, 9).write_bytes(image_bytes(99))
    assert build("--retry-rejected") == 1
    assert "do not come out as they were, so that nothing of them was replaced: 1\n" in capsys.readouterr().err
    mend(images, 9)
    assert build("--retry-rejected") == 0
    after = timeless_files(cache)
    for name in ("latents/c/1/0/0/0", "samples/000001.parquet"):
        assert after[name] == before[name]
