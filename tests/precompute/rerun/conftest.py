"""Builds with other caches beside them."""

from pathlib import Path

import pytest

from tests.precompute.acts import make_foreign
from tests.precompute.conftest import Project


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    return make_foreign(tmp_path_factory.mktemp("foreign"), vae_path)


@pytest.fixture
def built(built: Project, foreign: Path) -> Project:
    """With other caches in its folder."""
    (built.folder / "foreign").symlink_to(foreign)
    return built
