"""A cache in an object store keeps every promise of one in a folder: made, killed, damaged, mended, read and copied."""

import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from torch.utils.data import DataLoader

from cache_store import open_cache
from cache_store.verify.verify import verify
from tests.cache_store.verify.test_damage import SCENES, assert_flipped_bits_are_named, harm, make_sound
from tests.precompute.conftest import timeless_files
from trainer import LatentStream

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
    objects.mirror(folder)
    return url


@pytest.mark.parametrize("form", ["zarr", "webdataset"])
def test_a_build_has_the_bytes_of_one_in_a_folder(scene, url, objects, run, tmp_path, form):
    option = f"--store.format {form}"
    run(build(scene, tmp_path / "cache", option))
    assert f"next: cache-store verify {url} --level full" in run(build(scene, url, option))
    assert objects.timeless() == timeless_files(tmp_path / "cache")
    before = objects.places()
    assert "nothing to encode" in run(build(scene, url, option))
    assert "sound (deep): 2 shards" in run(f"cache-store verify {url} --level deep")
    assert f"cache           {url}\n" in run(f"cache-store info {url}")
    assert objects.places() == before
    here, there = open_cache(tmp_path / "cache"), open_cache(url)
    assert here.identity == there.identity
    numbers = np.array([3, 0, 1, 1])
    np.testing.assert_array_equal(here.read(numbers), there.read(numbers))
    assert here.samples(numbers) == there.samples(numbers)


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


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_those_of_a_folder(folder, built, workers):
    """Also in a worker that is forked from a process that has read."""
    here, there = (LatentStream(each, batch_size=3, seed=1, epochs=2) for each in (folder, built))
    there.read_batch(0)
    for expected, found in zip(here, DataLoader(there, batch_size=None, num_workers=workers), strict=True):
        assert all((expected[name] == found[name]).all() for name in ("latents", "numbers"))


# Kills, and ranks.


def start(line):
    """A command line in a process of its own."""
    program, *arguments = line.split()
    command = [sys.executable, "-m", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_killed_build_resumes_to_the_same_objects(scene, folder, url, objects, run, proxy):
    """Killed before the server has an object, and after."""
    whole = timeless_files(folder)
    for fault, number in (("reset", 4), ("lost", 3)):
        process = start(build(scene, url))
        proxy.fail(fault, "PUT", first=number, also=process.kill)
        assert process.wait() == -signal.SIGKILL
        assert all(whole[name] == data for name, data in objects.timeless().items())
        proxy.mend()
    run(build(scene, url))
    assert objects.timeless() == whole
    run(f"cache-store verify {url} --level full")


def test_ranks_at_once_write_the_objects_of_one_build(scene, folder, url, objects, run):
    """And so does a twin of one of them."""
    run(build(scene, url).replace(" build", " plan", 1))
    twins = [start(build(scene, url, "--rank 0 --world-size 2")) for _ in range(2)]
    run(build(scene, url, "--rank 1 --world-size 2"))
    assert [twin.wait() for twin in twins] == [0, 0]
    run(build(scene, url).replace(" build", " seal", 1))
    assert objects.timeless() == timeless_files(folder)


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
        objects.mirror(copy)
        return verify(url, "full").findings

    assert_flipped_bits_are_named(copy, look, 30)


@pytest.mark.parametrize("name", SCENES)
def test_damage_in_a_bucket_is_named_as_on_disk(copy, url, objects, name):
    harm(copy, name)
    objects.mirror(copy)
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


def test_converted_caches_are_those_of_a_folder(folder, built, url, bucket, run, tmp_path, server):
    from tests.object_stores.objects import Objects

    run(f"cache-store convert {folder} {tmp_path}/here --format webdataset")
    run(f"cache-store convert {built} {tmp_path}/down --format webdataset")
    run(f"cache-store convert {built} {bucket}/across --format webdataset")
    run(f"cache-store convert {tmp_path}/here {bucket}/up --format zarr")
    assert timeless_files(tmp_path / "down") == timeless_files(tmp_path / "here")
    assert Objects(f"{bucket}/across", server.endpoint).timeless() == timeless_files(tmp_path / "here")
    assert Objects(f"{bucket}/up", server.endpoint).timeless() == timeless_files(folder)
