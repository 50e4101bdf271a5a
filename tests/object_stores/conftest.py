"""A second server, and what makes waits short; the first, its buckets and its proxy are every test's."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import precompute.rerun.steps as build_module
from cache_store.cli import main as cache_store
from cache_store.storage import objects as object_stores
from cache_store.storage import retrying
from precompute.cli import main as precompute
from precompute.encoders.registry import load_encoder
from tests.object_stores.server import Server, running_server
from tests.precompute.conftest import config_values, vae_path, write_config, write_source

if TYPE_CHECKING:
    from tests.object_stores.objects import Objects

__all__ = ["vae_path"]  # a fixture


@pytest.fixture(scope="session")
def witness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server("moto", tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def url(bucket: str) -> str:
    """Where a cache may be made."""
    return f"{bucket}/some/cache"


@pytest.fixture
def objects(url: str, server: Server) -> "Objects":
    from tests.object_stores.objects import Objects  # which needs obstore

    return Objects(url, server.endpoint)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up after a second or two what a program tries for most of a minute."""
    limits = {"CONNECT_S": 1, "ANSWER_S": 1, "RETRIED_S": 2, "MAX_RETRIES": 1}
    pauses = {"BUSY_S": 1.0, "FIRST_PAUSE_S": 0.05, "WARNED_EACH_S": 0}
    for module, values in ((object_stores, limits), (retrying, pauses)):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    """A config of five samples in two shards, one rejected, and its cache in a folder."""
    folder = tmp_path_factory.mktemp("scene")
    small: dict[str, Any] = {"store__samples_per_shard": 3, "encoder__batch_size": 2, "run__max_reject_fraction": 0.5}
    small |= {"image__height": 16, "image__width": 16}
    source = write_source(folder / "source", range(5))
    config = write_config(folder / "build.yaml", config_values(folder / "cache", source, vae_path, **small))
    assert precompute(["build", "--config", str(config)]) == 0
    return folder


load_once = cache(load_encoder)


@pytest.fixture(autouse=True)
def quick_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "load_encoder", load_once)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a program says to a command line, which ends with a code and without a traceback."""

    def said(line: str, code: int = 0) -> str:
        capsys.readouterr()
        program, *arguments = line.split()
        ended = {"precompute": precompute, "cache-store": cache_store}[program](arguments)
        text = "".join(capsys.readouterr())
        assert ended == code, text
        assert "Traceback" not in text
        return text

    return said
