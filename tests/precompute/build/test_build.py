"""Builds by the command line: what is cached, and what ends a build before its seal."""

import io
import os
import subprocess
import sys
import zlib
from random import Random

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from cache_store import open_cache
from cache_store.cache.metadata import read_samples
from cache_store.cli import main as cache_store
from cache_store.verify.verify import verify
from precompute.cli import main
from tests.precompute.conftest import BROKEN, SAMPLES, image_bytes, sample_name, timeless_files
from tests.precompute.images.hostile_images import save


def test_images_of_broken_exif_are_cached_and_counted(project):
    """The count is the whole cache's, whichever run built the shards, also in a copy of another form."""
    no_exif = save(Image.open(io.BytesIO(image_bytes(2))), "PNG", exif=bytes(8))
    project.has(sample_002=no_exif, sample_003=no_exif, sample_015=no_exif)
    for _ in range(2):
        assert "broken EXIF in 3 " in project.build()
    project.run(cache_store, "copy", project.cache, project.folder / "tars", "--format", "webdataset")
    for cache in (project.cache, project.folder / "tars"):
        assert "broken EXIF     3 cached images, not turned" in project.run(cache_store, "info", cache)
        assert not verify(cache, "deep").findings


@pytest.mark.parametrize("threads", [1, 4])
def test_the_threads_that_torch_was_given_change_no_byte(built, threads):
    """OMP_NUM_THREADS or the machine chooses them; at this size, 1 and 4 threads compute other last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        built.build(name="again", run__workers=1)
    finally:
        torch.set_num_threads(before)
    assert timeless_files(built.folder / "again") == built.files()


def test_too_many_rejects_end_the_build_and_say_why(project):
    few = {"run__max_reject_fraction": 0.01}
    message = project.build(code=1, **few)
    for named in ("1 of 22", "0.01", "sample-004", "--run.max_reject_fraction", "--retry-rejected"):
        assert named in message
    assert not (project.cache / "seal.json").exists()
    project.has(**{f"sample_{number:03d}": image_bytes(number) for number in BROKEN})
    project.build("--retry-rejected", **few)
    assert not verify(project.cache, "full").findings
    project.has(**{f"sample_{number:03d}": b"no image" for number in range(SAMPLES)})
    said = project.build(name="nothing", run__max_reject_fraction=1.0, code=1)
    assert all(named in said for named in ("none of 22", "sample-000", "--retry-rejected"))


def test_a_cache_in_its_sources_folder_is_said_and_is_no_part_of_the_source(project):
    """Its claim, which the build holds while it lists the folder, is no part of the source either."""
    project.unpack()
    project.settings = {"source": {"kind": "folder", "path": str(project.images)}}
    project.cache = project.images / "inside"
    for is_new in (True, False):
        assert ("folder that is a cache 1" in project.build("--cache", project.cache)) is not is_new


def test_missing_images_end_a_build_before_it_begins(project, monkeypatch):
    project.has([0, 1])
    archive = project.images.rename(project.folder / "few.zip")
    project.has()
    message = project.build("--cache", str(project.folder / "new/folders/cache"), source__images=str(archive), code=1)
    for named in ("20 of 22", str(archive), "to continue without these samples, raise --run.max_reject_fraction"):
        assert named in message
    project.unpack()
    monkeypatch.chdir(project.source)
    assert "source.images" in project.build(source__images=None, source__path="chat.json", code=1)
    assert not (project.folder / "new").exists()
    assert not project.cache.exists()


def test_a_disk_that_fails_rejects_nothing(project):
    """Reading /proc/self/mem at its start is a real input/output error."""
    project.unpack()
    image = project.images / "sample-009.png"
    image.unlink()
    image.symlink_to("/proc/self/mem")
    assert "Input/output error" in project.build(code=1)
    assert not (project.cache / "seal.json").exists()


def test_an_error_of_a_decoder_ends_no_more_than_its_file(project, monkeypatch):
    project.has()
    project.build()
    chance, load = Random(0), PngImageFile.load

    def fail_at_random(image: PngImageFile) -> object:
        if chance.random() < 0.5:
            raise chance.choice([ValueError, RuntimeError, IndexError, MemoryError, zlib.error])("an odd byte")
        return load(image)

    monkeypatch.setattr(PngImageFile, "load", fail_at_random)
    assert "Error: an odd byte" in project.run(main, "audit", project.cache, "--samples", SAMPLES, code=1)
    project.build(name="again", run__max_reject_fraction=1)
    monkeypatch.undo()
    again = project.caches.below("again")
    tables = (read_samples(again.address, shard, ["reason"]) for shard in range(3))
    reasons = [reason for table in tables for reason in table["reason"].to_pylist() if reason is not None]
    assert SAMPLES > sum(reason.endswith("rror: an odd byte") for reason in reasons) > 0
    project.build("--retry-rejected", name="again")
    assert again.timeless() == project.files()


@pytest.mark.slow
def test_a_host_without_a_compiler_is_told_at_once(project):
    done = subprocess.run(
        [sys.executable, "-m", "precompute", "build", "--config", str(project.config()), "--encoder.compile", "true"],
        env={**os.environ, "CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(project.folder / "inductor")},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("precompute: error: encoder.compile")
    assert not project.cache.exists()


def test_an_extension_names_rejects_that_may_succeed_now(project):
    """Of two broken images and a missing one, two are there now."""
    project.unpack()
    (project.images / "sample-018.png").unlink()
    project.build()
    project.has(range(24))
    for number in (18, BROKEN[0], 22, 23):
        (project.images / f"{sample_name(number)}.png").write_bytes(image_bytes(number))
    said = project.build("--extend")
    assert "there now, or have changed: 2 (" in said
    assert all(sample_name(number) in said for number in (18, BROKEN[0]))
    seal = open_cache(project.cache).seal
    assert (seal.spec.rows, seal.rejected) == (24, len(BROKEN) + 1)
