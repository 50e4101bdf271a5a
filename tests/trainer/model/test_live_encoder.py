"""Guarantee 6: cached training is live training."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import Image

from cache_store import open_cache
from cache_store.cache.files import open_plan
from precompute.build import build
from precompute.config import BuildConfig, RunConfig, StoreConfig
from precompute.encode.batches import Batch
from precompute.encoders.config import EncoderConfig
from precompute.encoders.registry import load_encoder
from precompute.images.decode import ImageConfig
from precompute.sources import SourceConfig, open_source
from tests.trainer.conftest import describe
from tests.trainer.runs import ALONE, metrics
from trainer.commands.train import train

SAMPLES, BROKEN = 22, 5


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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildConfig:
    """A float32 cache of small pictures, one of them broken, made by the product's own build."""
    root = tmp_path_factory.mktemp("live")
    torch.manual_seed(0)
    AutoencoderKLWan(base_dim=8, num_res_blocks=1).save_pretrained(root / "vae")
    rng = np.random.default_rng(0)
    records = []
    for row in range(SAMPLES):
        pixels = rng.integers(0, 255, (6, 5, 3), np.uint8)
        Image.fromarray(pixels).resize((40, 30), Image.Resampling.BICUBIC).save(root / f"{row:02d}.png")
        records.append({"id": f"{row:02d}", "image": f"{row:02d}.png", "conversations": describe(row)})
    (root / f"{BROKEN:02d}.png").write_bytes(b"no image")
    (root / "chat.json").write_text(json.dumps(records))
    config = BuildConfig(
        cache=str(root / "cache"),
        source=SourceConfig(kind="llava", path=str(root / "chat.json"), images=str(root)),
        image=ImageConfig(height=32, width=32),
        encoder=EncoderConfig(model=str(root / "vae"), compute_dtype="float32", batch_size=4, device="cpu"),
        store=StoreConfig(dtype="float32", samples_per_shard=8),
        run=RunConfig(max_reject_fraction=0.1),
    )
    build(config)
    return config


def test_cached_training_is_training_with_the_encoder_in_the_loop(configured, built, tmp_path):
    cached, live = (configured(name, cache=Path(built.cache)) for name in ("cached", "live"))
    train(cached, ALONE)
    train(live, ALONE, LiveEncoder(built))
    losses = metrics(tmp_path / "cached")
    assert losses == metrics(tmp_path / "live")
    assert len(losses) >= 6
    assert metrics(tmp_path / "cached", "grad_norm") == metrics(tmp_path / "live", "grad_norm")
