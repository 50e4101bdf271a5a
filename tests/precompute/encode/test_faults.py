"""Disks that fill up and fail, permissions and sources that go away: one line, nothing half-written, and a rerun
that ends in the bytes of an undisturbed build.
"""

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import yaml

import precompute.build
from cache_store.cache.metadata import read_commit, read_spec
from cache_store.cli import main as cache_store
from cache_store.format.formats import shard_format
from cache_store.format.schema import SEAL_FILE, StoreFormat
from cache_store.storage.store import STORES
from precompute.cli import main
from precompute.encoders.registry import load_encoder
from tests.faulty_store import FaultyDisk, FaultyStore
from tests.full_disk import largest_file, make_room, mounted_disk
from tests.precompute.conftest import (
    BROKEN,
    assert_same_as_undisturbed,
    config_values,
    image_bytes,
    run_build,
    sample_name,
    timeless_files,
    write_config,
    write_source,
)
from tests.precompute.processes import start_building

SMALL = {
    "image__height": 16,
    "image__width": 16,
    "encoder__batch_size": 2,
    "store__samples_per_shard": 3,
    "run__max_reject_fraction": 0.5,
}
SAMPLES = 5
"""Two shards, of three rows and two; one image is no image."""


@pytest.fixture(scope="module", params=get_args(StoreFormat))
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    """A folder of `source`, `config.yaml` and an undisturbed `cache`."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_source(folder / "source", range(SAMPLES))
    values = config_values(folder / "cache", folder / "source", vae_path, store__format=request.param, **SMALL)
    assert main(["build", "--config", str(write_config(folder / "config.yaml", values))]) == 0
    return folder


@pytest.fixture
def quick_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the encoder once for all builds of a test."""
    monkeypatch.setattr(precompute.build, "load_encoder", cache(load_encoder))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    """Of the caches at `faulty://PATH`."""
    disk = FaultyDisk()
    monkeypatch.setitem(STORES, "faulty", lambda path: FaultyStore(Path(path), disk))
    return disk


def build_in(folder: Path, undisturbed: Path) -> list[str]:
    """The arguments of the same build in another folder."""
    return ["build", "--config", str(undisturbed / "config.yaml"), "--cache", f"faulty://{folder}"]


def assert_whole(cache: Path, *wholes: Path) -> None:
    """Every file is one of the undisturbed build or of what was there before, or absent; no scratch is left.

    Where there is a seal, shards and samples tables are all there, and those that it was made of.
    """
    allowed, found = [timeless_files(whole) for whole in wholes], timeless_files(cache)
    for name, data in found.items():
        assert any(data == each.get(name) for each in allowed), name
    if SEAL_FILE in found:
        assert sealed_files(found) in map(sealed_files, allowed)
    if not (cache / "zarr.json").exists():
        return
    for path in cache.glob("commits/*.json"):
        held = read_commit(cache, int(path.stem))
        assert any(held.content == getattr(read_commit(each, int(path.stem)), "content", None) for each in wholes)


def sealed_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """The seal, the shards, and their samples tables."""
    folders = ("latents/c/", "shards/", "samples/")
    return {name: data for name, data in files.items() if name == SEAL_FILE or name.startswith(folders)}


def assert_said_in_one_line(capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    starts = ("precompute: error: ", "cache-store: error: ")
    (line,) = [line for line in error.replace("\r", "\n").splitlines() if line.startswith(starts)]
    for part in parts:
        assert part in line


def disturb_every_step(
    disk: FaultyDisk,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    cache: Path,
    before: Path | None,
    whole: Path,
    program: Callable[[list[str]], int] = main,
    stays: str | None = None,
) -> None:
    """Make every write, sync and rename of a run fail in turn; run again each time.

    The file `stays` is there after each, as it was.
    """
    start_from(before, cache)
    disk.count.clear()
    assert program(arguments) == 0
    steps = [(kind, number) for kind, total in dict(disk.count).items() for number in range(1, total + 1)]
    assert {kind for kind, _ in steps} == {"write", "sync", "rename"}
    wholes = [whole, before] if before else [whole]
    for kind, number in steps:
        start_from(before, cache)
        capsys.readouterr()
        disk.choose(kind, number)
        assert program(arguments) == 1, (kind, number)
        problem = "No space left on device" if kind == "write" else "Input/output error"
        assert_said_in_one_line(capsys, f"{problem}: {cache.parent}")
        assert_whole(cache, *wholes)
        assert stays is None or (cache / stays).read_bytes() == (whole / stays).read_bytes(), (kind, number)
        disk.mend()
        assert program(arguments) == 0, (kind, number)
        assert timeless_files(cache) == timeless_files(whole), (kind, number)


def start_from(before: Path | None, cache: Path) -> None:
    shutil.rmtree(cache, ignore_errors=True)
    if before:
        shutil.copytree(before, cache)


@pytest.mark.usefixtures("quick_loading")
def test_no_half_file_is_left_by_a_disk_failing_in_a_build(undisturbed, tmp_path, disk, capsys):
    cache = tmp_path / "cache"
    disturb_every_step(disk, capsys, build_in(cache, undisturbed), cache, None, undisturbed / "cache")


@pytest.mark.usefixtures("quick_loading")
def test_no_half_file_is_left_by_a_disk_failing_in_a_repair(undisturbed, tmp_path, disk, capsys):
    cache, damaged = tmp_path / "cache", tmp_path / "damaged"
    shutil.copytree(undisturbed / "cache", damaged)
    shard = damaged / shard_format(read_spec(damaged)).shard_file(0)
    shard.write_bytes(bytes(reversed(shard.read_bytes())))
    repair = ["repair", f"faulty://{cache}", "--shards", "[0]"]
    disturb_every_step(disk, capsys, repair, cache, damaged, undisturbed / "cache", stays=SEAL_FILE)


GROWN = range(SAMPLES + 2)
"""One row more in the partly filled shard, and another shard."""


@pytest.mark.usefixtures("quick_loading")
def test_no_half_file_is_left_by_a_disk_failing_in_an_extension(undisturbed, tmp_path, disk, capsys):
    arguments, before = changed_source(undisturbed, tmp_path, GROWN)
    assert main([*arguments, "--cache", str(tmp_path / "whole")]) == 0
    cache, arguments = tmp_path / "cache", [*arguments, "--cache", f"faulty://{tmp_path}/cache", "--extend"]
    disturb_every_step(disk, capsys, arguments, cache, before, tmp_path / "whole")


@pytest.mark.usefixtures("quick_loading")
def test_no_half_file_is_left_by_a_disk_failing_in_a_retry(undisturbed, tmp_path, disk, capsys):
    (broken,) = set(BROKEN) & set(range(SAMPLES))
    mended = {sample_name(broken).replace("-", "_"): image_bytes(broken)}
    arguments, before = changed_source(undisturbed, tmp_path, range(SAMPLES), **mended)
    whole, cache = tmp_path / "whole", tmp_path / "cache"
    shutil.copytree(before, whole)
    assert main([*arguments, "--cache", str(whole), "--retry-rejected"]) == 0
    disturb_every_step(
        disk, capsys, [*arguments, "--cache", f"faulty://{cache}", "--retry-rejected"], cache, before, whole
    )


def changed_source(undisturbed: Path, folder: Path, numbers: range, **replaced: bytes) -> tuple[list[str], Path]:
    """A build from a source in `folder` that has changed since the undisturbed cache was built, and that cache."""
    values = yaml.safe_load((undisturbed / "config.yaml").read_text())
    source = write_source(folder / "source", numbers, **replaced)
    values["source"] |= {"path": str(source / "chat.json"), "images": str(source / "images.zip")}
    return ["build", "--config", str(write_config(folder / "changed.yaml", values))], undisturbed / "cache"


def test_no_half_file_is_left_by_a_disk_failing_in_a_conversion(undisturbed, tmp_path, disk, capsys):
    """Into the other form, from either."""
    source, whole, cache = undisturbed / "cache", tmp_path / "whole", tmp_path / "cache"
    (form,) = set(get_args(StoreFormat)) - {read_spec(source).store_format}
    convert = ["convert", str(source), f"faulty://{cache}", "--format", form]
    assert cache_store(["convert", str(source), str(whole), "--format", form]) == 0
    disturb_every_step(disk, capsys, convert, cache, None, whole, cache_store)


def shard_sized_build(folder: Path, source: Path, vae: Path, name: str) -> tuple[Path, list[str]]:
    """A build whose shards are larger than every other file of its cache."""
    sizes = {"image__height": 128, "image__width": 128, "store__samples_per_shard": 8}
    values = config_values(folder / name, source, vae, **sizes)
    return folder / name, ["build", "--config", str(write_config(folder / f"{name}.yaml", values))]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_shard_that_may_not_grow_stops_the_build(tmp_path, source_path, vae_path, capfd, workers):
    """Also where it is a worker's: its failure is the build's."""
    whole, arguments = shard_sized_build(tmp_path, source_path, vae_path, "whole")
    assert main(arguments) == 0
    cache, arguments = shard_sized_build(tmp_path, source_path, vae_path, "cache")
    capfd.readouterr()
    with largest_file(40_000):  # which a process started now inherits, and a fork server started before does not
        done = subprocess.run(
            [sys.executable, "-m", "precompute", *arguments, "--run.workers", str(workers)], check=False
        )
    assert done.returncode == 1
    assert_said_in_one_line(capfd, f"File too large: {cache}/latents/c/")
    assert_whole(cache, whole)
    assert not list(cache.glob("commits/*"))
    assert main(arguments) == 0
    assert timeless_files(cache) == timeless_files(whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", "96k") as folder:
        yield folder


def test_room_on_a_full_disk_lets_its_build_go_on(tmp_path, small_disk, source_path, vae_path, capsys):
    whole, arguments = shard_sized_build(tmp_path, source_path, vae_path, "whole")
    assert main(arguments) == 0
    cache, arguments = shard_sized_build(small_disk, source_path, vae_path, "cache")
    capsys.readouterr()
    assert main(arguments) == 1
    assert_said_in_one_line(capsys, f"No space left on device: {cache}/")
    assert_whole(cache, whole)
    make_room(small_disk)
    assert main(arguments) == 0
    assert timeless_files(cache) == timeless_files(whole)


OBEYING = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
"""Makes root obey permissions like anyone else."""


def test_a_folder_that_turns_read_only_is_named(tmp_path, source_path, vae_path):
    if os.geteuid() == 0 and shutil.which(OBEYING[0]) is None:
        pytest.skip("root obeys no permissions and there is no setpriv to make it")
    values = config_values(tmp_path / "cache", source_path, vae_path, store__samples_per_shard=1)
    process, arguments = start_building(tmp_path, values, OBEYING if os.geteuid() == 0 else [])
    process.send_signal(signal.SIGSTOP)
    (tmp_path / "cache/latents/c").chmod(0o555)
    process.send_signal(signal.SIGCONT)
    _, error = process.communicate(timeout=300)
    (tmp_path / "cache/latents/c").chmod(0o755)
    assert process.returncode == 1, error
    assert f"precompute: error: Permission denied: {tmp_path}/cache/latents/c/" in error
    assert "Traceback" not in error
    assert not list((tmp_path / "cache").rglob("*.partial"))
    assert main(arguments) == 0
    assert_same_as_undisturbed(tmp_path, values)


def test_images_that_disappear_stop_the_build(tmp_path, source_path, vae_path, at_second_batch, capsys):
    """Within the share of rejects that is allowed, too."""
    images = source_path / "images"
    with zipfile.ZipFile(source_path / "images.zip") as archive:
        archive.extractall(images)
    allowed = {"source__images": str(images), "run__max_reject_fraction": 1.0}
    at_second_batch.append(lambda: images.rename(source_path / "elsewhere"))
    run_build(tmp_path, source_path, vae_path, code=1, **allowed)
    assert_said_in_one_line(capsys, "was there when the cache was planned and is gone", "sample-0")
    (source_path / "elsewhere").rename(images)
    run_build(tmp_path, source_path, vae_path, **allowed)
    assert_same_as_undisturbed(tmp_path, config_values(tmp_path / "cache", source_path, vae_path, **allowed))


def test_a_zip_that_is_replaced_or_deleted_is_read_to_its_end(tmp_path, source_path, vae_path, at_second_batch):
    archive = source_path / "images.zip"
    kept = archive.read_bytes()
    at_second_batch.append(archive.unlink)
    cache = run_build(tmp_path, source_path, vae_path)
    archive.write_bytes(kept)
    assert_same_as_undisturbed(tmp_path, config_values(cache, source_path, vae_path))


def make_tar(source: Path) -> Path:
    with zipfile.ZipFile(source / "images.zip") as archive, tarfile.open(source / "images.tar", "w") as tar:
        for member in archive.infolist():
            entry = tarfile.TarInfo(member.filename)
            entry.size = member.file_size
            tar.addfile(entry, io.BytesIO(archive.read(member)))
    return source / "images.tar"


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("change", ["cut", "overwritten"])
def test_an_archive_that_is_changed_in_place_stops_the_build(
    tmp_path, source_path, vae_path, at_second_batch, capsys, kind, change
):
    archive = make_tar(source_path) if kind == "tar" else source_path / "images.zip"
    allowed = {"source__images": str(archive), "run__max_reject_fraction": 1.0}
    kept, status = archive.read_bytes(), archive.stat()
    changed = kept[: len(kept) // 4] if change == "cut" else bytes(reversed(kept))
    at_second_batch.append(lambda: archive.write_bytes(changed))
    run_build(tmp_path, source_path, vae_path, code=1, **allowed)
    assert_said_in_one_line(capsys, f"{archive} was changed while it was read")
    archive.write_bytes(kept)
    os.utime(archive, ns=(status.st_atime_ns, status.st_mtime_ns))
    run_build(tmp_path, source_path, vae_path, **allowed)
    assert_same_as_undisturbed(tmp_path, config_values(tmp_path / "cache", source_path, vae_path, **allowed))
