"""Verifications of several caches, and what monitoring sees of them."""

import json
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from cache_store.cli import main
from tests.cache_store.conftest import flip, shard_name
from tests.make_cache import make_cache

SHARDS = 5


@pytest.fixture
def caches(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    latents = [rng.standard_normal((2 * SHARDS, 2, 3, 4), np.float32) for _ in range(2)]
    return [make_cache(tmp_path / name, each, samples_per_shard=2) for name, each in zip("ab", latents, strict=True)]


def test_each_of_several_caches_has_its_report(caches, tmp_path, capsys):
    (tmp_path / "reports").mkdir()
    both = ["verify", *map(str, caches), "--report", str(tmp_path / "reports")]
    assert main([*both, "--level", "full"]) == 0
    said = capsys.readouterr().out
    assert said.index(f"{caches[0]}:\nsound (full)") < said.index(f"{caches[1]}:\nsound (full)")
    (caches[0] / "seal.json").unlink()
    assert main(both) == 1, "one cache that is not sound is enough"
    reports = [tmp_path / "reports" / f"{tmp_path.name}-{name}.json" for name in "ab"]
    assert [json.loads(report.read_bytes())["sound"] for report in reports] == [False, True]
    assert main(["verify", *map(str, caches), "--report", str(tmp_path / "one.json")]) == 2
    assert "name a folder" in capsys.readouterr().err
    assert main(["verify", *map(str, caches), str(caches[0]), *both[3:]]) == 2
    assert "one file" in capsys.readouterr().err
    assert main(["verify", *map(str, caches), "--metrics", "/dev/full"]) == 2, "1 would say that there is damage"
    assert "metrics: /dev/full" in capsys.readouterr().err


def test_a_cache_that_is_not_there_does_not_keep_others_from_being_verified(caches, tmp_path, capsys):
    metrics = tmp_path / "caches.prom"
    assert main(["verify", str(tmp_path / "gone"), str(caches[0]), "--metrics", str(metrics)]) == 2
    said = capsys.readouterr()
    assert "sound (quick)" in said.out
    assert f"{tmp_path / 'gone'} holds no cache" in said.err
    assert f'encode_once_cache_sound{{cache="{tmp_path / "gone"}",level="quick"}} 0\n' in metrics.read_text()
    assert f'encode_once_cache_sound{{cache="{caches[0]}",level="quick"}} 1\n' in metrics.read_text()
    (caches[0] / "seal.json").unlink()
    assert main(["verify", *map(str, caches), str(tmp_path / "gone"), "--metrics", str(metrics)]) == 1


def test_metrics_tell_findings_by_kind_and_when_all_was_last_read_and_sound(caches, tmp_path):
    metrics, cache = tmp_path / "caches.prom", str(caches[0])

    def values(*options: str) -> dict[str, float]:
        main(["verify", cache, *options, "--metrics", str(metrics)])
        lines = [line for line in metrics.read_text().splitlines() if not line.startswith("#")]
        pairs = (line.split() for line in lines)
        labels = (f'cache="{cache}",', ""), (f'cache="{cache}"', ""), ("{}", ""), ("encode_once_cache_", "")
        return {reduce(lambda text, each: text.replace(*each), labels, name): float(value) for name, value in pairs}

    assert "verified_time_seconds" not in values()
    whole = values("--level", "full")
    assert whole['sound{level="full"}'] == 1
    assert whole["verified_time_seconds"] == whole["verification_time_seconds"]
    flip(caches[0] / shard_name(caches[0], 3), 5)
    damaged = values("--level", "full")
    assert (damaged['sound{level="full"}'], damaged['findings{kind="damaged"}']) == (0, 2)
    assert damaged["verified_time_seconds"] == whole["verified_time_seconds"], "the last time is kept"
    assert values("--subset", "1/5")["verified_time_seconds"] == whole["verified_time_seconds"]
