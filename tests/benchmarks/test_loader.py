import json

import numpy as np
import pytest

from benchmarks import loader

# webdataset leaves its tars open for the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


def test_every_rival_delivers_whole_batches_and_one_json_record(capsys, tmp_path):
    options = ["--samples", "96", "--batch-size", "32", "--repeats", "1", "--folder", str(tmp_path)]
    assert loader.main(options) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(record["samples_per_s"]) == {*loader.RIVALS, *loader.BOUNDS, *loader.OURS}
    assert all(figures["median"] > 0 for figures in record["samples_per_s"].values())
    assert record["disk_bytes"]["none"] > 96 * 25_088
    assert list(tmp_path.iterdir()) == [], "what was written for the run is removed"


def test_every_side_delivers_the_stored_latents_once_each(tmp_path):
    latents = np.random.default_rng(0).standard_normal((12, *loader.SHAPE), np.float32).astype(np.float16)
    stored = {sample.tobytes() for sample in latents}
    for name, batches in loader.prepare(tmp_path, latents, batch_size=4, samples_per_shard=5).items():
        delivered = [sample.tobytes() for batch in batches(np.random.default_rng(1)) for sample in batch.copy()]
        assert len(delivered) == len(stored), name
        assert set(delivered) == stored, name
