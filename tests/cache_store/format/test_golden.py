"""Small caches, one of each form, written once and committed: today's code must read them and still write their bytes.

Parquet files carry their writer's version and are compared by content. To change the format on purpose, raise
FORMAT_VERSION and write the caches anew with `python -m tests.cache_store.format.test_golden`.
"""

import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow.parquet as pq
import pytest

from cache_store import open_cache
from cache_store.format.schema import StoreFormat
from cache_store.verify.verify import verify
from tests.make_cache import make_cache

HERE = Path(__file__).parent
GOLDEN = {"zarr": HERE / "golden", "webdataset": HERE / "golden_webdataset"}
IDENTITIES = {
    "zarr": "0011bcb0ad21a19029717b201c78e32108172cd56873c86e4ea0ace4e741ce21",
    "webdataset": "afb1598e831457a482c65324e5f68189defc2d1b648946ed47ee4e5b10ee7440",
}
WRITTEN_ALIKE = {
    "zarr": ("zarr.json", "latents/zarr.json", "latents/c/0/0/0/0", "latents/c/1/0/0/0"),
    "webdataset": ("zarr.json", "shards/000000.tar", "shards/000001.tar"),
}
TABLES = ("plan.parquet", "samples/000000.parquet", "samples/000001.parquet")


def golden_latents() -> np.ndarray:
    """[6, 2, 2, 3], every value exact in float16."""
    return (np.arange(6 * 2 * 2 * 3, dtype=np.float32).reshape(6, 2, 2, 3) - 36) / 8


def write_golden(path: Path, store_format: StoreFormat) -> Path:
    return make_cache(path, golden_latents(), rejected=[2], samples_per_shard=4, store_format=store_format)


@pytest.mark.parametrize("store_format", GOLDEN)
def test_the_golden_cache_is_sound_and_reads_as_it_was_written(store_format):
    assert not verify(GOLDEN[store_format], "deep").findings
    cache = open_cache(GOLDEN[store_format])
    expected = np.delete(golden_latents(), 2, axis=0).astype(np.float16)
    np.testing.assert_array_equal(cache.read(np.arange(5)), expected)
    assert cache.seal.identity == IDENTITIES[store_format]


@pytest.mark.parametrize("store_format", GOLDEN)
def test_todays_code_writes_the_golden_bytes(tmp_path, store_format):
    path, golden = write_golden(tmp_path / "cache", store_format), GOLDEN[store_format]
    for name in WRITTEN_ALIKE[store_format]:
        assert (path / name).read_bytes() == (golden / name).read_bytes(), name
    for name in TABLES:
        assert pq.read_table(path / name).equals(pq.read_table(golden / name)), name


if __name__ == "__main__":
    for form in get_args(StoreFormat):
        shutil.rmtree(GOLDEN[form], ignore_errors=True)
        write_golden(GOLDEN[form], form)
        print(form, open_cache(GOLDEN[form]).seal.identity)
