"""A small cache written once and committed: today's code must read it, and must still write its bytes.

Parquet files carry their writer's version and are compared by content. To change the format on purpose, raise
FORMAT_VERSION and write the cache anew with `python -m tests.cache_store.test_golden`.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from cache_store import open_cache
from cache_store.verify import verify
from tests.make_cache import make_cache

GOLDEN = Path(__file__).parent / "golden"
WRITTEN_ALIKE = ("zarr.json", "latents/zarr.json", "latents/c/0/0/0/0", "latents/c/1/0/0/0")


def golden_latents() -> np.ndarray:
    """[6, 2, 2, 3], every value exact in float16."""
    return (np.arange(6 * 2 * 2 * 3, dtype=np.float32).reshape(6, 2, 2, 3) - 36) / 8


def write_golden(path: Path) -> Path:
    return make_cache(path, golden_latents(), rejected=[2], samples_per_shard=4)


def test_the_golden_cache_is_sound_and_reads_as_it_was_written():
    assert not verify(GOLDEN, "full").findings
    cache = open_cache(GOLDEN)
    expected = np.delete(golden_latents(), 2, axis=0).astype(np.float16)
    np.testing.assert_array_equal(cache.read(np.arange(5)), expected)
    assert cache.seal.identity == "e09daa93915914c4371645f0e45670126e8dba25a690331c670294d46fa080b5"


def test_todays_code_writes_the_golden_bytes(tmp_path):
    path = write_golden(tmp_path / "cache")
    for name in WRITTEN_ALIKE:
        assert (path / name).read_bytes() == (GOLDEN / name).read_bytes(), name
    for name in ("plan.parquet", "samples/000000.parquet", "samples/000001.parquet"):
        assert pq.read_table(path / name).equals(pq.read_table(GOLDEN / name)), name


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    write_golden(GOLDEN)
    sys.exit(print(open_cache(GOLDEN).seal.identity))
