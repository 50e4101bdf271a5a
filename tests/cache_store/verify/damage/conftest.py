"""The damage matrix: every kind of damage to every kind of file, in every form, is found and named.

Here are the caches to damage and what a verification named of them. What an honest program cannot see is an edit of how
and when a shard was made (`run` in a commit record) that is signed anew: clocks and hosts enter no digest.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pyarrow.parquet as pq
import pytest

from cache_store.format.schema import SEAL_FILE, commit_file, samples_file
from cache_store.verify.findings import Finding, Level
from tests.cache_store.conftest import samples_of, shard_name
from tests.make_cache import make_cache

ROWS, ROWS_PER_SHARD, REJECTED = 14, 6, (2, 9)
SHARD = 1
LEVELS: tuple[Level, ...] = get_args(Level)
NAMES = Callable[[Path, int], str]


def make_small(path: Path, form: tuple[str, str], **options: Any) -> Path:
    store_format, codec = form
    settings: dict[str, Any] = {"rejected": REJECTED, "samples_per_shard": ROWS_PER_SHARD}
    settings["latents"] = samples_of((4, 6, 5), ROWS)
    return make_cache(path, store_format=store_format, codec=codec, **settings | options)


@pytest.fixture(scope="module")
def sound(form: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards, the last one short, two rows rejected; nothing changes it."""
    return make_small(tmp_path_factory.mktemp("sound") / "cache", form)


@pytest.fixture
def cache(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound, tmp_path / "cache"))


def files_of(cache: Path) -> list[str]:
    return sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())


def record_file(cache: Path, shard: int) -> str:
    return commit_file(shard)


def table_file(cache: Path, shard: int) -> str:
    return samples_file(shard)


def seal_file(cache: Path, shard: int) -> str:
    return SEAL_FILE


SHARD_FILES: tuple[NAMES, ...] = (shard_name, table_file, record_file)


def named(findings: tuple[Finding, ...]) -> set[str]:
    return {finding.file for finding in findings}


def rows_named(findings: tuple[Finding, ...]) -> set[int]:
    return {finding.row for finding in findings if finding.row is not None}


class Sample(NamedTuple):
    row: int
    slot: int
    offset: int
    end: int


def samples_in(cache: Path, shard: int) -> list[Sample]:
    rows = enumerate(pq.read_table(cache / samples_file(shard), partitioning=None).to_pylist())
    places = ((row["row"], slot, row["offset"], row["length"]) for slot, row in rows if row["status"] == "cached")
    return [Sample(row, slot, offset, offset + length) for row, slot, offset, length in places]


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
