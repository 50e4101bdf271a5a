"""The number of workers on a machine."""

from dataclasses import replace

import pytest

from precompute.config import BuildConfig, RunConfig
from precompute.encode.crew import Machine, crew_of, crew_on_gpus
from precompute.encoders.encoder_config import EncoderConfig
from precompute.images.config import ImageConfig
from precompute.sources.config import SourceConfig

GIB = 2**30
NODE = Machine(cores=128, host_bytes=1_024 * GIB, gpus=8, gpu_bytes=75 * GIB)
ONE_GPU = replace(NODE, cores=16, gpus=1, host_bytes=128 * GIB)


def make_config(device="auto", workers="auto", side=224, dtype="bfloat16", max_tokens=None) -> BuildConfig:
    return BuildConfig(
        cache="cache",
        source=SourceConfig(kind="folder", path="images", text="caption" if max_tokens else None),
        encoder=EncoderConfig(model="model", device=device, compute_dtype=dtype, max_tokens=max_tokens),
        image=ImageConfig() if max_tokens else ImageConfig(height=side, width=side),
        run=RunConfig(workers=workers),
    )


@pytest.mark.parametrize(
    ("machine", "options", "shards", "crew"),
    [
        (ONE_GPU, {}, 146, (4, 4)),
        (NODE, {}, 146, (32, 32)),
        (NODE, {"device": "cuda:3"}, 146, (4, 32)),  # a rank's: other ranks have the other GPUs, and their cores
        (NODE, {}, 5, (5, 8)),
        (replace(ONE_GPU, cores=8), {}, 146, (2, 2)),
        (replace(ONE_GPU, host_bytes=12 * GIB), {}, 146, (3, 3)),
        (replace(ONE_GPU, gpu_bytes=20 * GIB), {}, 146, (2, 2)),
        (ONE_GPU, {"side": 1024, "dtype": "float32"}, 146, (1, 1)),
        (NODE, {"max_tokens": 512}, 146, (8, 8)),  # a text encoder has one worker on each GPU
    ],
)
def test_workers_on_gpus_follow_from_cores_memory_and_shards(machine, options, shards, crew):
    assert crew_on_gpus(make_config(**options), shards, machine) == crew


def test_a_cpu_has_a_worker_for_each_pair_of_threads(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 9)
    assert [crew_of(make_config("cpu"), shards) for shards in (1, 3, 100)] == [(1, 1), (3, 3), (4, 4)]
    assert crew_of(make_config("cpu", workers=2), 100) == (2, 2)
