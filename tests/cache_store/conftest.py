from pathlib import Path

import numpy as np
import pytest

from cache_store.cache.metadata import read_spec
from cache_store.format.formats import shard_format
from cache_store.format.schema import StoreFormat
from tests.make_cache import make_cache
from tests.places import Folder

ROWS, REJECTED = 30, (3, 9, 29)
CACHED_ROWS = [row for row in range(ROWS) if row not in REJECTED]
SHAPES = [(12,), (3, 8), (4, 3, 2), (2, 3, 4, 5)]


def samples_of(shape: tuple[int, ...], rows: int = ROWS, seed: int = 7) -> np.ndarray:
    """float32 [rows, *shape], each value exact in float16."""
    return np.random.default_rng(seed).standard_normal((rows, *shape)).astype(np.float16).astype(np.float32)


@pytest.fixture(scope="session")
def latents() -> np.ndarray:
    """float32 [30, 4, 6, 5]."""
    return samples_of((4, 6, 5))


@pytest.fixture(scope="module", params=[("zarr", "none"), ("zarr", "zstd"), ("webdataset", "none")], ids="-".join)
def form(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(params=["zarr", "webdataset"])
def store_format(request: pytest.FixtureRequest) -> StoreFormat:
    return request.param


@pytest.fixture
def cache(tmp_path: Path, latents: np.ndarray, store_format: StoreFormat) -> Path:
    """Four shards of up to 8 rows, three rows rejected; in both forms."""
    return make_cache(tmp_path / "cache", latents, rejected=REJECTED, store_format=store_format)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def swap(first: Path, second: Path) -> None:
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)


def shard_name(cache: Path, shard: int) -> str:
    return shard_format(read_spec(cache)).shard_file(shard)


def contents(folder: Path) -> dict[str, bytes]:
    return Folder(folder).files()
