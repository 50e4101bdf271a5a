"""What the pipeline holds at a time, and what its figures mean."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cache_store.metadata import read_spec
from precompute.cli import main
from precompute.pipeline import BATCHES_AHEAD, decoded_batches, planned_batches, timed
from precompute.sources import SourceConfig, open_source
from tests.precompute.conftest import config_values, write_config


@pytest.fixture
def planned(tmp_path, source_path, vae_path):
    """A built cache's root, spec and source: 22 samples in batches of 1."""
    values = config_values(tmp_path / "cache", source_path, vae_path, encoder__batch_size=1)
    assert main(["build", "--config", str(write_config(tmp_path / "b.yaml", values))]) == 0
    config = SourceConfig(kind="llava", path=str(source_path / "chat.json"), images=str(source_path / "images.zip"))
    return tmp_path / "cache", read_spec(tmp_path / "cache"), open_source(config)


def test_decoding_runs_a_few_batches_ahead_and_no_further(planned):
    """So memory does not grow with the data set, however slow the encoder is."""
    root, spec, source = planned
    started = []

    def counted():
        for batch in planned_batches(root, spec, range(spec.num_shards)):
            started.append(batch.shard)
            yield batch

    with ThreadPoolExecutor(2) as pool:
        batches = decoded_batches(counted(), pool, source, spec.arrays["latents"].image)
        for taken in range(1, 10):
            next(batches).wait()
            time.sleep(0.01)
            assert len(started) == taken + BATCHES_AHEAD


def test_time_waited_for_images_is_the_time_the_encoder_stood_idle(planned):
    """With images held back, the encoder waits; with all of them ready, it does not."""
    root, spec, source = planned
    gate = threading.Event()
    read = source.read

    def held_back(uri: str) -> bytes:
        gate.wait()
        return read(uri)

    source.read = held_back
    threading.Timer(0.3, gate.set).start()
    recipe = spec.arrays["latents"].image
    with ThreadPoolExecutor(2) as pool:
        held = decoded_batches(planned_batches(root, spec, [0]), pool, source, recipe)
        assert sum(waited_s for _, waited_s, _ in timed(held, torch.device("cpu"))) > 0.2
        ready = [batch.decode(pool, source, recipe) for batch in planned_batches(root, spec, [0])]
        for batch in ready:
            batch.wait()
        time.sleep(0.3)  # an encoder at work on an earlier batch
        assert sum(waited_s for _, waited_s, _ in timed(iter(ready), torch.device("cpu"))) < 0.2
