"""A small build; tests/conftest.py has the servers, their buckets and the proxy."""

from pathlib import Path

import pytest

from tests.command_runs import make_scene, quick_loading, run
from tests.object_stores.faults import impatient
from tests.object_stores.server import Server
from tests.places import Objects
from tests.precompute.conftest import vae_path

__all__ = ["impatient", "quick_loading", "run", "vae_path"]  # fixtures


@pytest.fixture
def url(bucket: str) -> str:
    return f"{bucket}/some/cache"


@pytest.fixture
def objects(url: str, server: Server) -> Objects:
    return Objects(url, server.endpoint)


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    return make_scene(tmp_path_factory.mktemp("scene"), vae_path, "zarr")
