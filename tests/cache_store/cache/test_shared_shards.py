"""Several writers of one shard: the first wins; others accept equal bytes and report different ones."""

import numpy as np
import pytest

from cache_store.cache.metadata import open_plan, read_commit, read_spec
from cache_store.cache.writer import ShardBuilder
from cache_store.errors import CacheError, StaleError
from cache_store.format.formats import files_of_shard
from cache_store.format.layout import commit_file
from cache_store.storage.local import LocalStore
from tests.cache_store.conftest import REJECTED, contents
from tests.make_cache import make_cache, outcome


@pytest.fixture
def store(tmp_path, latents, store_format) -> LocalStore:
    """A cache without shard 0."""
    path = make_cache(tmp_path / "cache", latents, rejected=REJECTED, store_format=store_format, seal=False)
    for name in (commit_file(0), *files_of_shard(read_spec(path), 0)):
        (path / name).unlink()
    return LocalStore(path)


def writer(store, latents) -> ShardBuilder:
    """Write shard 0 without committing it."""
    planned = open_plan(store).shard(0)
    rgb = np.zeros((planned.num_rows, *latents.shape[2:], 3), np.float32)
    builder = ShardBuilder(store, read_spec(store), 0, planned, shared=True).__enter__()
    builder.append(latents[: planned.num_rows], rgb, [outcome(row, row in REJECTED) for row in range(planned.num_rows)])
    return builder


def commit(builder, device="cpu"):
    try:
        return builder.commit(seconds=1.0, device=device, versions={})
    finally:
        builder.__exit__(None, None, None)


def test_the_first_writer_of_a_shard_wins(store, latents):
    """Two write at the same time, one later, and one writes different latents."""
    first, second, other = writer(store, latents), writer(store, latents), writer(store, latents + 1)
    record = commit(first)
    before = contents(store.root)
    assert commit(second) == record
    assert (first.is_others, second.is_others) == (False, True)
    assert commit(writer(store, latents)) == record
    with pytest.raises(StaleError, match=r"(?s)shard 0.*device.*cuda:7"):
        commit(other, device="cuda:7")
    assert contents(store.root) == {name: data for name, data in before.items() if ".partial" not in name}


def test_files_without_a_record_are_taken_if_they_are_the_same(store, latents):
    """A writer that dies before it writes the record leaves such files."""
    record = commit(writer(store, latents))
    store.delete(commit_file(0))
    with pytest.raises(CacheError, match="sha256"):
        commit(writer(store, latents + 1))
    assert read_commit(store, 0) is None
    assert commit(writer(store, latents)).content == record.content
