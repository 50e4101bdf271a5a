"""Guarantee 6: cached training is live training."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from cache_store import open_cache
from cache_store.cache.files import open_plan
from cache_store.program.command_line import parse_config
from precompute.config import BuildConfig
from precompute.encode.batches import Batch
from precompute.encoders.registry import load_encoder
from precompute.sources import open_source
from tests.precompute.conftest import make_vae, run_build, write_source
from tests.trainer.runs import ALONE, assert_same_run, metrics
from trainer.commands.train import train


class LiveEncoder:
    """Latents by sample number as the cache gives them, but encoded from the image each time, in its planned batch."""

    def __init__(self, config: BuildConfig) -> None:
        self.cache = open_cache(config.cache)
        self.source = open_source(config.source)
        self.encoder = load_encoder(config.encoder, config.image.range)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        rows = self.cache.samples(numbers, columns=["row"])["row"].to_pylist()
        return np.stack([self.encode(row) for row in rows])

    def encode(self, row: int) -> np.ndarray:
        spec = self.cache.spec
        array = spec.array
        shard, place = divmod(row, spec.samples_per_shard)
        planned = open_plan(self.cache.store).shard(shard)
        start = place - place % array.encoder.batch_size
        batch = Batch(spec, planned, shard, start, min(start + array.encoder.batch_size, planned.num_rows))
        with ThreadPoolExecutor(1) as pool:
            batch.decode(pool, self.source, array.image).wait()
        return self.encoder.encode(torch.from_numpy(batch.pixels_NYX3))[place - start].numpy()


def test_cached_training_is_training_with_the_encoder_in_the_loop(configured, tmp_path):
    cache = run_build(tmp_path, write_source(tmp_path / "source"), make_vae(tmp_path), store__dtype="float32")
    build = parse_config(BuildConfig, [f"--config={tmp_path}/build.yaml"], "precompute build")
    cached, live = (configured(name, cache=cache, epochs=4) for name in ("cached", "live"))
    train(cached, ALONE)
    train(live, ALONE, LiveEncoder(build))
    assert_same_run(cached, live)
    assert len(metrics(cached.run.folder)) == 6
