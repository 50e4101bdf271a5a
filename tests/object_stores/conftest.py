"""A second server and a small build; tests/conftest.py has the first server, its buckets and its proxy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precompute.cli import main as precompute
from tests.command_runs import quick_loading, run
from tests.object_stores.faults import impatient
from tests.object_stores.server import Server, running_server
from tests.places import Objects
from tests.precompute.conftest import config_values, vae_path, write_config, write_source

__all__ = ["impatient", "quick_loading", "run", "vae_path"]  # fixtures


@pytest.fixture(scope="session")
def witness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server("moto", tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def url(bucket: str) -> str:
    """URL of a place for a cache."""
    return f"{bucket}/some/cache"


@pytest.fixture
def objects(url: str, server: Server) -> Objects:
    return Objects(url, server.endpoint)


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
