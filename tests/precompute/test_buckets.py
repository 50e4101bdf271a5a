"""Caches of images of many sizes: planned by bucket, built, resumed, mended, grown and read like any other cache."""

import io
import os
import random
import re
import signal
import tarfile
import time
import zipfile
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import zarr
from diffusers import AutoencoderKLWan
from PIL import ExifTags, Image, ImageOps

from cache_store import open_cache, open_joined
from cache_store.cache.metadata import read_spec
from cache_store.cli import main as cache_store
from cache_store.format.layout import SIZES as READ_SIZES
from cache_store.verify.verify import verify
from precompute.cli import main
from precompute.encode_images import encode_images
from precompute.rerun import file_sizes
from tests.precompute.conftest import Project, flip, image_bytes, timeless_files
from tests.precompute.encode.builds import start_build, wait_for

BUCKETS = {"preset": "ours", "resolution": 64, "min": 32, "max": 128, "step": 16}
SIZES = [(50, 40), (40, 50), (64, 64), (90, 30), (200, 100), (33, 77), (500, 333)]
NUM_IMAGES = 30


def picture(number: int, size: tuple[int, int]) -> bytes:
    """Make a picture of this size: of even numbers as JPEG, one of them stored turned."""
    stream, exif = io.BytesIO(), Image.Exif()
    image = Image.open(io.BytesIO(image_bytes(number))).resize(size, Image.Resampling.BICUBIC)
    if number % 6 == 0:
        image, exif[ExifTags.Base.Orientation] = image.transpose(Image.Transpose.ROTATE_90), 6
    image.save(stream, "PNG" if number % 2 else "JPEG", exif=exif)
    return stream.getvalue()


def write_pictures(path: Path, *numbers: int, size: tuple[int, int] | None = None) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        file = path / f"p{number:02d}.png"
        file.write_bytes(picture(number, size or SIZES[number % len(SIZES)]))
        os.utime(file, ns=(0, 0))


@pytest.fixture
def project(project: Project) -> Project:
    """A folder of pictures of several aspects, and of one file that is no image."""
    project.images = None
    write_pictures(project.source / "pictures", *range(NUM_IMAGES))
    (project.source / "pictures/p05.png").write_bytes(b"no image")
    os.utime(project.source / "pictures/p05.png", ns=(0, 0))
    project.settings = {
        "source": {"kind": "folder", "path": str(project.source / "pictures")},
        "image": {"buckets": BUCKETS},
        "store__samples_per_shard": 4,
    }
    return project


def test_latents_are_those_of_the_scaled_and_cut_images(project):
    """Compared with diffusers' own encode of Pillow's pixels; the samples tables say how each image was placed."""
    project.build()
    cache = open_cache(project.cache)
    samples = cache.samples(
        np.arange(len(cache)), ["id", "width", "height", "resized_width", "resized_height", "crop_left", "crop_top"]
    ).to_pylist()
    assert len(samples) == NUM_IMAGES - 1
    assert len(cache.arrays) >= 4
    model = AutoencoderKLWan.from_pretrained(project.vae, subfolder="vae")
    for number, sample in enumerate(samples):
        (latent,) = cache.read(np.array([number]))
        array = cache.array_of(np.array([number])).size
        with Image.open(project.source / "pictures" / sample["id"]) as image:
            upright = ImageOps.exif_transpose(image)
            assert upright.size == (sample["width"], sample["height"])
            scaled = upright.convert("RGB").resize(
                (sample["resized_width"], sample["resized_height"]), Image.Resampling.BILINEAR
            )
        left, top = sample["crop_left"], sample["crop_top"]
        seen = np.asarray(scaled.crop((left, top, left + array.width, top + array.height)), np.float32) / 127.5 - 1
        with torch.no_grad():
            expected = model.encode(torch.from_numpy(seen).permute(2, 0, 1)[None, :, None]).latent_dist.mean
        np.testing.assert_allclose(latent, expected[0, :, 0].numpy(), rtol=1e-3, atol=1e-3)  # stored as float16


def test_every_shard_has_one_size_and_zarr_reads_each_array(project):
    said = project.build()
    cache, spec = open_cache(project.cache), read_spec(project.cache)
    group = zarr.open_group(project.cache, mode="r")
    assert sum(run.shards * run.rows for run in spec.shards) == NUM_IMAGES
    rows = Counter[str]()
    for run in spec.shards:
        rows[run.array] += run.shards * run.rows
    assert {*rows} == {*spec.names}
    most = max(rows.values())
    assert f"{len(rows)} sizes of images: {most} of " in said
    assert said.partition(f" images: {most} of ")[2].partition(",")[0] in rows
    for index, name in enumerate(spec.names):
        numbers = np.flatnonzero(cache.array_indices(np.arange(len(cache))) == index)
        rows = np.asarray(group[f"latents/{name}"])
        stored = rows[np.isfinite(rows).all(axis=(1, 2, 3))]
        assert len(stored) == len(numbers)
        np.testing.assert_array_equal(stored, cache.read(numbers))


def test_images_that_cannot_be_read_or_placed_are_rejected_with_a_reason(project):
    """An image that another one of another aspect replaced, with its old date, no longer belongs to its bucket."""
    project.run(main, "plan", "--config", project.config())
    write_pictures(project.source / "pictures", 7, size=(30, 90))
    project.run(main, "build", "--config", project.config(), "--rank", 0, "--world-size", 1)
    project.run(main, "seal", "--config", project.config())
    cache = open_cache(project.cache)
    reasons = dict(cache.seal.reasons)
    assert reasons == {"cannot decode": 1, "other bucket": 1}


def test_ranks_workers_and_killed_builds_give_the_same_bytes(project):
    project.build()
    project.build(name="workers", run__workers=2)
    for step in ("plan", "build --rank 0 --world-size 2", "build --rank 1 --world-size 2", "seal"):
        name, *options = step.split()
        project.run(main, name, "--config", project.config("ranks"), *options)
    killed = start_build(project.config("killed"))
    wait_for(lambda: list((project.folder / "killed").glob("commits/*.json")) or killed.poll() is not None)
    time.sleep(random.random() / 10)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    project.build(name="killed")
    for name in ("workers", "ranks", "killed"):
        assert timeless_files(project.folder / name) == project.files(), name


def test_codes_of_8_bits_are_grown_mended_and_off_by_half_a_step(project):
    """The same images are rejected as in float32."""
    project.build(name="exact", store__dtype="float32")
    project.settings["store__dtype"] = "uint8"
    project.build()
    exact, cache = open_cache(project.folder / "exact"), open_cache(project.cache)
    for number in range(len(exact)):
        latent, codes = exact.read(np.array([number])), cache.read(np.array([number]))
        step = np.ptp(latent, axis=(2, 3), keepdims=True) / 255
        assert (np.abs(latent - codes) <= step / 2 + 1e-6).all()
    whole, shard = project.files(), next(project.cache.glob("latents/*/c/0/0/0/0"))
    flip(shard)
    report = project.folder / "report.json"
    project.run(cache_store, "verify", project.cache, "--level", "full", "--report", report, code=1)
    project.run(main, "repair", project.cache, "--report", report)
    assert project.files() == whole
    write_pictures(project.source / "pictures", 40, 41)
    project.build("--extend")
    assert len(open_cache(project.cache)) == len(cache) + 2
    assert not verify(project.cache, "deep").findings


@pytest.mark.parametrize(
    "lost",
    [
        ["plan.parquet"],
        ["zarr.json", "seal.json"],
        ["zarr.json", "seal.json", "commits/000002.json"],
        ["latents/80x48/zarr.json", "samples/000001.parquet"],
    ],
    ids=lambda names: names[0],
)
def test_lost_files_are_mended_to_the_same_bytes(project, lost):
    project.build()
    assert all((project.cache / name).exists() for name in lost)
    with project.same_in_the_end():
        project.lose(*lost)
        project.build()


def test_new_images_fill_new_shards_of_old_and_new_sizes(project):
    project.build()
    before, marks = read_spec(project.cache), project.place.marks()
    write_pictures(project.source / "pictures", *range(40, 45))
    write_pictures(project.source / "pictures", 50, size=(20, 90))
    assert "--extend" in project.build(code=1)
    project.build("--extend")
    after = read_spec(project.cache)
    assert after.arrays[: len(before.arrays)] == before.arrays
    assert len(after.arrays) == len(before.arrays) + 1
    assert after.rows == before.rows + 6
    kept = {name for name in marks if name.split("/")[0] in ("commits", "samples") or "/c/" in name}
    assert {name: marks[name] for name in kept} == {name: project.place.marks()[name] for name in kept}
    assert not verify(project.cache, "full").findings
    assert "nothing to encode" in project.build()


@pytest.mark.parametrize(("changed", "left"), [({}, 20), ({"max_pixels": 10**6}, 30)], ids=["same", "another limit"])
def test_a_stopped_planning_goes_on_where_it_was(project, monkeypatch, changed, left):
    """No size is read twice, unless another limit may change it, and nothing of it stays."""
    monkeypatch.setattr(file_sizes, "BLOCK_ROWS", 10)
    read, read_size = [], file_sizes.FileSizes._size

    def counted(self, row):
        read.append(row)
        if len(read) == 18:
            raise OSError(5, "Input/output error")
        return read_size(self, row)

    monkeypatch.setattr(file_sizes.FileSizes, "_size", counted)
    project.build(code=1)
    assert sorted(path.name for path in project.cache.iterdir()) == [READ_SIZES]
    project.build(image={"buckets": BUCKETS, **changed})
    assert 18 + left <= len(read) <= 20 + left, "the first block of ten"
    assert not (project.cache / READ_SIZES).exists()


def test_another_resolution_over_the_same_plan_joins_row_by_row(project):
    project.build()
    other = {"kind": "cache", "path": str(project.cache)}
    project.build(name="small", source=other, image={"buckets": {**BUCKETS, "resolution": 32, "min": 16}})
    joined = open_joined({"large": project.cache, "small": project.folder / "small"})
    assert len(joined) == NUM_IMAGES - 1
    large, small = (each.shape[2:] for each in joined.read(np.array([3])).values())
    assert np.prod(large) > np.prod(small)


def test_paired_images_are_two_caches_of_one_plan(project):
    """As edit models are trained: a control image beside each target, in another column."""
    table = project.source / "pairs.parquet"
    sizes = [SIZES[number % len(SIZES)] for number in range(NUM_IMAGES)]
    columns = {
        name: [{"bytes": picture(first + number, size), "path": None} for number, size in enumerate(sizes)]
        for name, first in (("target", 0), ("control", 100))
    }
    features = datasets.Features({name: datasets.Image() for name in columns})
    datasets.Dataset.from_dict(columns, features=features).to_parquet(table, batch_size=8)
    project.build(source={"kind": "parquet", "path": str(table), "fields": {"image": "target"}})
    other = {"kind": "cache", "path": str(project.cache), "fields": {"image": "control"}}
    project.build(name="control", source=other)
    paired = open_joined({"target": project.cache, "control": project.folder / "control"})
    assert len(paired) == NUM_IMAGES
    first, second = (each.samples(np.arange(NUM_IMAGES), ["content_sha256"]) for each in paired.caches.values())
    assert not {*first["content_sha256"].to_pylist()} & {*second["content_sha256"].to_pylist()}
    assert [*paired.caches["target"].spec.shards] == [*paired.caches["control"].spec.shards]
    said = project.build(name="folder", code=2, source={**other, "path": str(project.folder / "none")})
    assert "none does not exist" in said


@pytest.mark.parametrize("kind", ["zip", "deflated zip", "tar"])
def test_sizes_are_read_from_archives_too(project, kind, tmp_path):
    project.build()
    archive = tmp_path / f"pictures.{kind[-3:]}"
    names = sorted((project.source / "pictures").iterdir())
    if kind == "tar":
        with tarfile.open(archive, "w") as made:
            made.add(project.source / "pictures", ".")
    else:
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED if "deflated" in kind else zipfile.ZIP_STORED) as made:
            for name in names:
                made.writestr(name.name, name.read_bytes())
    project.build(name="archived", source={"kind": "folder", "path": str(archive)})
    archived = open_cache(project.folder / "archived")
    assert archived.identity == open_cache(project.cache).identity


def test_an_estimate_knows_the_mix_of_sizes(project):
    project.build()
    cache = open_cache(project.cache)
    said = project.run(main, "estimate", "--config", project.config("estimated"), "--seconds", 1)
    (estimated,) = re.findall(r"none \(chosen\) +([\d,]+)", said)
    real = np.mean([cache.arrays[each].sample_bytes for each in cache.array_indices(np.arange(len(cache)))])
    assert float(estimated.replace(",", "")) == pytest.approx(real, rel=0.1)
    assert not (project.folder / "estimated").exists()


def test_commands_work_on_a_cache_of_many_sizes(project):
    project.build()
    assert "0 differ" in project.run(main, "audit", project.cache)
    project.run(main, "gallery", project.cache, "--output", project.folder / "gallery.html")
    assert "buckets ours, resolution 64" in project.run(cache_store, "info", project.cache)
    cache, numbers = open_cache(project.cache), [0, 20, 3]
    names = cache.samples(np.array(numbers), ["id"])["id"].to_pylist()
    encoded = encode_images(cache, [project.source / "pictures" / name for name in names])
    for latent, number in zip(encoded, numbers, strict=True):
        np.testing.assert_allclose(latent, cache.read(np.array([number]))[0], atol=1e-3)
    project.run(cache_store, "copy", project.cache, project.folder / "tars", "--format", "webdataset")
    assert not verify(project.folder / "tars", "full").findings


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"height": 64}, "image.height and image.buckets contradict each other"),
        ({"fit": "crop"}, "image.fit and image.buckets contradict each other"),
        (
            {"buckets": {"preset": "ours", "resolution": 96, "step": 12}},
            "image.buckets.step 12 does not suit the encoder: .* multiples of 8",
        ),
    ],
)
def test_buckets_that_cannot_be_are_refused_before_planning(project, image, message):
    said = project.build(code=2, image={"buckets": BUCKETS, **image})
    assert re.search(message, " ".join(said.split())), said
    assert "image.buckets" not in project.build("--encoder.model", "missing", code=2, image={"buckets": BUCKETS})
    assert not project.cache.exists()


def test_a_set_of_many_sizes_grows_without_its_withdrawn_images(project):
    """One of them is still in the source, the other is gone."""
    project.build()
    (project.folder / "ids.txt").write_text("p03.png\np17.png\n")
    project.run(cache_store, "withdraw", project.cache, "--ids", project.folder / "ids.txt")
    (project.source / "pictures/p03.png").unlink()
    project.build()
    write_pictures(project.source / "pictures", 30, 31)
    project.build("--extend")
    cache = open_cache(project.cache)
    assert cache.seal.reasons == {"cannot decode": 1, "withdrawn": 2}
    assert {"p30.png", "p31.png"} <= {*cache.samples(np.arange(len(cache)), ["id"])["id"].to_pylist()}
    assert not verify(project.cache, "deep").findings
