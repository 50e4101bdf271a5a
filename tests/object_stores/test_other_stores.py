"""A cache at GCS or Azure equals the cache in a folder, for every program that writes or reads one.

Azure is Azurite, GCS is `server.Google`; no account of either was tried.
"""

import numpy as np
import pytest

from cache_store import open_cache
from tests.object_stores.server import OTHERS, environment
from tests.places import Folder, Objects
from trainer import LatentStream

pytestmark = pytest.mark.slow

IN_OTHER_STORES = pytest.mark.parametrize("scheme", OTHERS)

SHARD = "latents/16x16/c/1/0/0/0"


@IN_OTHER_STORES
def test_a_build_and_ranks_write_the_bytes_of_the_cache_in_a_folder(scene, objects, run):
    whole, config = Folder(scene / "cache").timeless(), f"--config {scene}/build.yaml --cache"
    alone, ranks = objects.below("alone"), objects.below("ranks")
    run(f"precompute build {config} {alone.url}")
    assert alone.timeless() == whole
    with alone.untouched():
        assert "nothing to encode" in run(f"precompute build {config} {alone.url}")
    run(f"precompute plan {config} {ranks.url}")
    for rank in (1, 0):
        run(f"precompute build {config} {ranks.url} --rank {rank} --world-size 2")
    run(f"precompute seal {config} {ranks.url}")
    assert ranks.timeless() == whole


@IN_OTHER_STORES
def test_a_cache_is_read_copied_and_mended(scene, url, objects, run, tmp_path, ministack, monkeypatch):
    """It is copied from a folder to S3, to the store, and back to a folder."""
    for name, value in environment(ministack.endpoint).items():
        monkeypatch.setenv(name, value)
    whole, s3 = Folder(scene / "cache"), f"s3://{ministack.new_bucket()}/cache"
    for here, there in ((whole.path, s3), (s3, url), (url, tmp_path / "copy")):
        run(f"cache-store copy {here} {there}")
    assert objects.files() == Folder(tmp_path / "copy").files() == whole.files()
    assert f"cache           {url}\n" in run(f"cache-store info {url}")
    folder, cache = open_cache(whole.path), open_cache(url)
    assert cache.samples(np.arange(4)).equals(folder.samples(np.arange(4)))
    streams = (LatentStream(each, 2, seed=1) for each in (folder, cache))
    assert all(np.array_equal(a["latents"], b["latents"]) for a, b in zip(*streams, strict=True))
    objects.flip(SHARD)
    assert SHARD in run(f"cache-store verify {url} --level full", code=1)
    run(f"precompute repair {url} --shards 1")
    assert objects.timeless() == whole.timeless()
    run(f"cache-store copy {url} {url}-tars --format webdataset")
    run(f"cache-store copy {url}-tars {url}-again --format zarr")
    assert "sound (deep): 2 shards" in run(f"cache-store verify {url}-again --level deep")


def test_another_server_takes_a_build(scene, witness, run, monkeypatch):
    """Moto is a second opinion on S3's protocol."""
    for name, value in environment(witness.endpoint).items():
        monkeypatch.setenv(name, value)
    url = f"s3://{witness.new_bucket()}/cache"
    run(f"precompute build --config {scene}/build.yaml --cache {url}")
    assert Objects(url, witness.endpoint).timeless() == Folder(scene / "cache").timeless()
    run(f"cache-store verify {url} --level full")
