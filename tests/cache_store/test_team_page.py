"""The page on running it for a team: its commands as typed, its alerts, and what it says of users."""

import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml

from cache_store import open_cache
from cache_store.cli import main
from tests.make_cache import make_cache

PAGE = (Path(__file__).parents[2] / "docs/guide/team.md").read_text()


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    """Caches of a data set, made by a user whose group may write."""
    before = os.umask(0o002)
    for name in ("cc3m/vae", "cc3m/siglip", "laion/vae"):
        make_cache(tmp_path / name, np.ones((6, 2, 3, 4), np.float32), samples_per_shard=2)
    os.umask(before)
    return tmp_path


def expanded(word: str) -> list[str]:
    """Expand a pattern as a shell does."""
    path = Path(word)
    return sorted(map(str, path.parent.glob(path.name))) if "*" in path.name else [word]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_every_command_of_the_page_runs(caches, tmp_path, monkeypatch, capsys):
    (tmp_path / "work" / "reports").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    for line in "".join(blocks("bash")).replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line.replace("/caches/", f"{caches}/"))
        typed = [each for word in words for each in expanded(word)]
        assert program == "cache-store"
        assert main(typed) == 0, line
    assert sorted(path.name for path in Path("reports").iterdir()) == ["cc3m-vae.json", "laion-vae.json", "siglip.json"]
    assert open_cache(caches / "cc3m-vae").identity == open_cache(caches / "cc3m/vae").identity
    (alerts,) = map(yaml.safe_load, blocks("yaml"))
    metrics = Path("caches.prom").read_text()
    for rule in alerts["groups"][0]["rules"]:
        (name,) = re.findall(r"encode_once_\w+", rule["expr"])
        assert f"\n{name}{{" in metrics
