"""Workers on this machine, as processes."""

import threading
from dataclasses import replace

import pytest

from cache_store.cache.metadata import read_spec
from cache_store.errors import StaleError
from cache_store.storage.local import LocalStore
from precompute.config import BuildConfig, RunConfig
from precompute.encode.engines.local import num_workers, run_local
from precompute.encode.job import EncodeJob
from precompute.encoders.registry import load_encoder
from precompute.sources import open_source
from tests.precompute.conftest import make_vae


def test_a_model_that_changes_as_workers_start_stops_the_build(built):
    config = BuildConfig.of_cache(built.cache)
    encoder, source = load_encoder(config.encoder, config.image.range), open_source(config.source)
    other = replace(config.encoder, model=str(make_vae(built.folder / "other", seed=1)))
    changed = replace(config, encoder=other, run=RunConfig(workers=2))
    job = EncodeJob(config=changed, store=LocalStore(built.cache), spec=read_spec(built.cache), shards=[0, 1])
    with built.untouched(), pytest.raises(StaleError, match="encoder.model changed while the build") as refused:
        run_local(job, source, encoder, threading.Event(), lambda _: None)
    assert "weights_sha256" in str(refused.value)


def test_there_are_no_more_workers_than_shards_and_never_none(built):
    config = BuildConfig.of_cache(built.cache)
    assert [num_workers(replace(config, run=RunConfig(workers=3)), shards) for shards in (1, 2, 9)] == [1, 2, 3]
    assert num_workers(config, 1) == 1
