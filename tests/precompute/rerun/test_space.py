"""A new cache that cannot fit is refused before anything is written; nothing is that might."""

import pytest

from cache_store.storage.local import LocalStore
from precompute.cli import main
from precompute.rerun import facts


def test_what_cannot_fit_is_refused_before_anything_is_written(project, monkeypatch):
    """22 samples of 640 bytes, of which a fifth may be rejected."""
    monkeypatch.setattr(facts, "free_bytes", lambda store: 11_000)
    for command in ("build", "plan"):
        said = project.run(main, command, "--config", project.config(), code=1)
        assert "needs at least 11.3 KB for its latents, but only 11.0 KB are free there" in said
        assert not list(project.cache.rglob("*.parquet"))
    project.build("--run.check_space", "false")
    project.build()


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_with_a_codec_nothing_is_certain(project, monkeypatch, codec):
    monkeypatch.setattr(facts, "free_bytes", lambda store: 0)
    project.build(store__codec=codec)


def test_free_space_is_that_of_the_folder_to_be(tmp_path):
    free = facts.free_bytes(LocalStore(tmp_path / "not" / "yet"))
    assert free is None or free > 0
