"""A cache in an object store keeps every promise of one in a folder: made, killed, damaged, mended, read and copied."""

import shutil

import pytest

from cache_store.verify.verify import verify
from tests.cache_store.verify.test_damage import SCENES, assert_flipped_bits_are_named, harm, make_sound
from tests.places import Folder
from tests.precompute.conftest import timeless_files

SHARD, TABLE, RECORD = "latents/c/0/0/0/0", "samples/000000.parquet", "commits/000000.json"


def build(scene, url, *options):
    return f"precompute build --config {scene}/build.yaml --cache {url} {' '.join(options)}"


@pytest.fixture(scope="module")
def folder(scene):
    """The cache in a folder that others are compared with."""
    return scene / "cache"


@pytest.fixture
def built(folder, url, objects):
    """A copy of it in a bucket."""
    objects.mirror(Folder(folder))
    return url


def test_another_server_takes_the_same_build(scene, folder, witness, run, monkeypatch):
    """Moto's idea of S3."""
    from tests.object_stores.objects import Objects
    from tests.object_stores.server import environment

    for name, value in environment(witness.endpoint).items():
        monkeypatch.setenv(name, value)
    url = f"s3://{witness.new_bucket()}/cache"
    run(build(scene, url))
    assert Objects(url, witness.endpoint).timeless() == timeless_files(folder)
    run(f"cache-store verify {url} --level full")


# Damage: what is named on disk, of which tests/cache_store/verify says all, is named in a bucket.


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return make_sound(tmp_path_factory.mktemp("sound"), "zarr", "none")


@pytest.fixture
def copy(sound, tmp_path):
    (tmp_path / "other").symlink_to(sound.parent / "other")
    return shutil.copytree(sound, tmp_path / "copy")


def test_any_flipped_bit_is_named_in_a_bucket(copy, url, objects):
    def look():
        objects.mirror(Folder(copy))
        return verify(url, "full").findings

    assert_flipped_bits_are_named(copy, look, 30)


@pytest.mark.parametrize("name", SCENES)
def test_damage_in_a_bucket_is_named_as_on_disk(copy, url, objects, name):
    harm(copy, name)
    objects.mirror(Folder(copy))
    for level in ("quick", "deep"):
        assert verify(url, level).findings == verify(copy, level).findings, level


DAMAGE = {
    "a flipped bit": {SHARD: lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:]},
    "a shard, its table and its record lost": dict.fromkeys((SHARD, TABLE, RECORD)),
    "a table cut, a record emptied": {TABLE: lambda data: data[:-1], RECORD: lambda data: b""},
    "half a plan, no zarr.json, no seal": {
        "plan.parquet": lambda data: data[: len(data) // 2],
        **dict.fromkeys(("zarr.json", "seal.json")),
    },
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_in_a_bucket_is_mended_to_the_same_objects(scene, folder, built, objects, run, tmp_path, what):
    for name, change in DAMAGE[what].items():
        if change is None:
            objects.lose(name)
        else:
            objects.put(name, change((folder / name).read_bytes()))
    report = tmp_path / "report.json"
    said = run(f"cache-store verify {built} --level full --report {report}", code=1)
    if f"precompute repair {built}" in said:
        run(f"precompute repair {built} --report {report}")
    run(build(scene, built))
    assert objects.timeless() == timeless_files(folder)
