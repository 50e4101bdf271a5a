"""A cache at GCS or Azure equals the cache in a folder, for every program that writes or reads one.

Azure is Azurite, GCS is `server.Google`; no account of either was tried.
"""

import pytest

from tests.object_stores.server import OTHERS
from tests.places import Folder

pytestmark = pytest.mark.slow

IN_OTHER_STORES = pytest.mark.parametrize("scheme", OTHERS)


@IN_OTHER_STORES
def test_a_build_and_ranks_write_the_bytes_of_the_cache_in_a_folder(scene, objects, run):
    whole, config = Folder(scene / "before").timeless(), f"--config {scene}/short.yaml --cache"
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
