"""A store of the Hub, and a cache copied to a bucket."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import HfFileSystem

from cache_store.cli import main as cache_store
from cache_store.storage import hub
from tests.cache_store.conftest import REJECTED
from tests.hub import running_hub
from tests.make_cache import make_cache
from tests.object_stores.faults import impatient

__all__ = ["impatient"]  # a fixture


@pytest.fixture
def hub_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with running_hub(tmp_path) as endpoint:
        files = HfFileSystem(endpoint=endpoint, token=False)
        monkeypatch.setattr(hub, "file_system", lambda: files)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield tmp_path


@pytest.fixture
def copied(bucket: str, tmp_path: Path, latents: np.ndarray) -> tuple[Path, str]:
    """A cache of 27 samples, and the URL of its copy in the bucket."""
    cache = make_cache(tmp_path / "cache", latents, rejected=REJECTED)
    assert cache_store(["copy", str(cache), f"{bucket}/copy"]) == 0
    return cache, f"{bucket}/copy"
