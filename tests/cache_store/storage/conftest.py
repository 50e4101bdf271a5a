"""The Hub, as this process reads it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfFileSystem

from cache_store.storage import hub
from tests.hub import running_hub


@pytest.fixture
def hub_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose files are those of DATA_SET."""
    with running_hub(tmp_path) as endpoint:
        files = HfFileSystem(endpoint=endpoint, token=False)
        monkeypatch.setattr(hub, "file_system", lambda: files)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield tmp_path
