"""Builds by the command line: what is cached, and what ends a build before its seal."""

import io
import os
import shutil
import subprocess
import sys
import zlib
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from cache_store import open_cache
from cache_store.cache.metadata import read_samples
from cache_store.cli import main as cache_store
from cache_store.format.array import Size
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.images.config import ImageConfig
from precompute.images.decode import decode_image
from precompute.images.fit import fit_image, placement_of
from tests.precompute.conftest import BROKEN, GOOD, SAMPLES, image_bytes, sample_name, timeless_files
from tests.precompute.encoders.loading import load
from tests.precompute.images.hostile_images import save


@pytest.mark.parametrize(("dtype", "tolerance", "flip"), [("float16", 2**-11, False), ("float32", 0.0, True)])
def test_cached_latents_equal_a_direct_encode(project, dtype, tolerance, flip):
    """They are equal up to rounding to the stored dtype: half a unit in the last place, relative.

    A flip mirrors the fitted pixels; a PNG is never reduced.
    """
    other = {"image__decode": "reduced"} if flip else {}
    project.build(store__dtype=dtype, encoder__batch_size=1, image__flip=flip, **other)
    assert ("flipped" in project.run(cache_store, "info", project.cache)) is flip
    cache, recipe, size = open_cache(project.cache), ImageConfig(height=32, width=40).recipe, Size(1, 32, 40)
    decoded = [decode_image(image_bytes(number), recipe, size) for number in GOOD]
    images = [fit_image(each, recipe, placement_of(each.size, recipe, size)) for each in decoded]
    pixels_N1YX3 = torch.from_numpy(np.stack([np.asarray(image)[None] for image in images]))
    pixels_N1YX3 = pixels_N1YX3.flip(3) if flip else pixels_N1YX3
    encoder = load(project.vae)
    direct = torch.cat([encoder.encode(image_11YX3) for image_11YX3 in pixels_N1YX3.split(1)]).numpy()
    cached = cache.read(np.arange(len(cache))).astype(np.float32)
    np.testing.assert_allclose(cached, direct, rtol=tolerance, atol=2**-24 if tolerance else 0.0)


MENDED = {sample_name(number).replace("-", "_"): image_bytes(number) for number in BROKEN}


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
    shutil.copytree(project.cache, project.folder / "allowed")
    project.build(name="allowed", run__max_reject_fraction=0.5)
    project.has(**MENDED)
    project.build("--retry-rejected", **few)
    assert not verify(project.cache, "full").findings


def test_a_cache_in_its_sources_folder_is_said_and_is_no_part_of_the_source(project):
    """Its claim, which the build holds while it lists the folder, is no part of the source either."""
    project.unpack()
    project.settings = {"source": {"kind": "folder", "path": str(project.images)}}
    project.cache = project.images / "inside"
    for is_new in (True, False):
        assert ("folder that is a cache 1" in project.build("--cache", project.cache)) is not is_new


def test_a_build_that_caches_nothing_gives_an_example(project):
    nothing = {sample_name(number).replace("-", "_"): b"no image" for number in range(SAMPLES)}
    project.has(**{**nothing, "sample_001": image_bytes(1)[:60]})
    for _ in range(2):
        message = project.build(run__max_reject_fraction=1.0, code=1)
        assert all(named in message for named in ("none of 22", "sample-000", "--retry-rejected"))


def test_missing_images_end_a_build_before_it_begins(project, monkeypatch):
    project.has([0, 1])
    archive = project.images.rename(project.folder / "few.zip")
    project.has()
    project.cache.mkdir()
    for name in ("cache", "new/folders/cache"):
        message = project.build("--cache", str(project.folder / name), source__images=str(archive), code=1)
        assert "20 of 22" in message
        assert str(archive) in message
        assert "to continue without these samples, raise --run.max_reject_fraction" in message
    project.unpack()
    monkeypatch.chdir(project.source)
    message = project.build(source__images=None, source__path="chat.json", code=1)
    assert "source.images" in message
    assert not list(project.cache.iterdir())
    assert not (project.folder / "new").exists()


def test_a_disk_that_fails_rejects_nothing(project):
    """Reading /proc/self/mem at its start is a real input/output error."""
    project.unpack()
    image = project.images / "sample-009.png"
    image.unlink()
    image.symlink_to("/proc/self/mem")
    assert "Input/output error" in project.build(code=1)
    assert not (project.cache / "seal.json").exists()
    image.unlink()
    image.write_bytes(image_bytes(9))
    project.build()
    assert open_cache(project.cache).seal.rejected == len(BROKEN)


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
