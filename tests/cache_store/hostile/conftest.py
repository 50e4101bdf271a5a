"""Small caches to fill with anything, little memory to read them in, and everything that reads a cache."""

import contextlib
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cache_store.cache.files import read_plan
from cache_store.cache.info import describe
from cache_store.cache.metadata import read_build
from cache_store.cache.reader import open_cache
from cache_store.errors import EncodeOnceError
from cache_store.format.schema import SAMPLES_SCHEMA, TEXT_COLUMNS, CodecName, StoreFormat
from cache_store.verify.verify import verify
from tests.make_cache import make_cache

MEMORY_BYTES = 2 * 2**30
"""Address space that all of it may take beyond what the process has: pyarrow maps much and touches little."""

RECORDS = ("zarr.json", "seal.json", "build.json", "commits/000000.json", "commits/000001.json")
TABLES = ("plan.parquet", "samples/000000.parquet")


def make_small(path: Path, store_format: StoreFormat, codec: CodecName) -> Path:
    latents = np.random.default_rng(0).standard_normal((7, 2, 3, 2)).astype(np.float32)
    return make_cache(path, latents, rejected=(2,), samples_per_shard=4, store_format=store_format, codec=codec)


@pytest.fixture(scope="module")
def sound(form, tmp_path_factory) -> Path:
    """A small cache of two shards, of each form."""
    return make_small(tmp_path_factory.mktemp("sound") / "cache", *form)


@pytest.fixture(scope="module")
def sound_zarr(tmp_path_factory) -> Path:
    """For what is the same in either form."""
    return make_small(tmp_path_factory.mktemp("sound") / "cache", "zarr", "none")


def afresh(cache: Path, folder: Path) -> Path:
    """A copy to damage, beside a file that is nobody's business."""
    (folder / "secret").write_bytes(b"secret")
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return Path(shutil.copytree(cache, folder / "cache"))


@pytest.fixture
def damaged(sound, tmp_path) -> Path:
    return afresh(sound, tmp_path)


@pytest.fixture
def root(sound_zarr, tmp_path) -> Path:
    return afresh(sound_zarr, tmp_path)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    (pages,) = Path("/proc/self/statm").read_text().split()[:1]
    resource.setrlimit(resource.RLIMIT_AS, (int(pages) * resource.getpagesize() + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


OPENED: set[str] = set()
sys.addaudithook(lambda event, arguments: OPENED.add(str(arguments[0])) if event == "open" else None)


def data_or_named_error(root: Path) -> None:
    """Everything that reads a cache; an error of any other class fails the test, want of memory too."""
    OPENED.clear()
    for use in (read_everything, verify_everything, describe, read_build, read_plan):
        with contextlib.suppress(EncodeOnceError):
            use(root)
    assert not any(name.endswith(("secret", "passwd")) for name in OPENED)


def read_everything(root: Path) -> None:
    cache = open_cache(root)
    numbers = np.arange(len(cache))[:100]
    assert cache.samples(numbers).column_names == [*SAMPLES_SCHEMA.names, *TEXT_COLUMNS]
    for check in (True, False):
        latents = cache.read(numbers, check=check)
        assert latents.shape == (len(numbers), *cache.spec.array.shape)


def verify_everything(root: Path) -> None:
    for level in ("quick", "deep"):
        for finding in verify(root, level).findings:
            assert str(finding)
