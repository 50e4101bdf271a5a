"""The state of a build from its commit records alone: rate, time left, last commits."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cache_store.cache.info import Pace, describe, pace_of
from cache_store.cli import main
from cache_store.log import utc_time
from tests.make_cache import make_cache

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
SHARDS, ROWS = 12, 4


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    latents = np.random.default_rng(0).standard_normal((SHARDS * ROWS, 2, 3, 4), np.float32)
    return make_cache(tmp_path_factory.mktemp("pace") / "cache", latents, samples_per_shard=ROWS)


@pytest.fixture
def pace(cache: Path):
    """Return the pace of a build of two hosts that committed each shard so many seconds ago, each in 40 s."""
    described = describe(cache)

    def pace(ago: dict[int, float]) -> Pace | None:
        records = {}
        for shard, seconds in ago.items():
            run = described.records[shard].run
            moment = utc_time(NOW - timedelta(seconds=seconds))
            run = msgspec.structs.replace(run, seconds=40.0, committed_at=moment, host=f"node{shard % 2}")
            records[shard] = msgspec.structs.replace(described.records[shard], run=run)
        return pace_of(described.spec, records, NOW)

    return pace


def test_the_rate_is_that_of_the_last_minutes_and_gives_the_time_left(pace):
    found = pace({0: 7_200, 1: 7_200, 2: 60, 3: 40, 4: 20, 5: 0})
    assert found.images_per_s == pytest.approx(4 * ROWS / 100), "from the first one's start to now, the old ones aside"
    assert found.rows_left == 6 * ROWS
    assert found.seconds_left == pytest.approx(6 * ROWS / found.images_per_s)
    assert [(each.host, each.shards, each.silent_s) for each in found.builders] == [("node0", 3, 20), ("node1", 3, 0)]


def test_info_tells_it_of_an_unfinished_cache(tmp_path, capsys):
    unfinished = make_cache(tmp_path / "cache", np.ones((12, 2, 3, 4), np.float32), samples_per_shard=4, seal=False)
    (unfinished / "commits/000001.json").unlink()
    assert main(["info", str(unfinished)]) == 0
    said = capsys.readouterr().out
    assert "pace            " in said
    assert " images/s now, 4 rows left: " in said
    assert "builder         cpu at " in said
    assert main(["info", str(unfinished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pace"]["rows_left"] == 4
