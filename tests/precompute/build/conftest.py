"""A built project with foreign caches in its folder."""

from pathlib import Path

import pytest

from tests.precompute.conftest import Project


@pytest.fixture
def built(built: Project, foreign: Path) -> Project:
    (built.folder / "foreign").symlink_to(foreign)
    return built
