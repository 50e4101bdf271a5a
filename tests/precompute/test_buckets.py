"""Caches of images of many sizes: which bucket each image has, and what planning reads and refuses."""

import io
import os
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import ExifTags, Image, ImageOps

from cache_store import open_cache, open_joined
from precompute.cli import main
from tests.precompute.conftest import Project, image_bytes

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


def test_images_that_cannot_be_read_or_placed_are_rejected_with_a_reason(project):
    """An image that another one of another aspect replaced, with its old date, no longer belongs to its bucket."""
    project.run(main, "plan", "--config", project.config())
    write_pictures(project.source / "pictures", 7, size=(30, 90))
    project.run(main, "build", "--config", project.config(), "--rank", 0, "--world-size", 1)
    project.run(main, "seal", "--config", project.config())
    cache = open_cache(project.cache)
    reasons = dict(cache.seal.reasons)
    assert reasons == {"cannot decode": 1, "other bucket": 1}


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
