"""How many workers a machine gets."""

from dataclasses import replace

import pytest

from precompute.config import BuildConfig, RunConfig
from precompute.encode.local_engine import Crew, Machine, crew_of, crew_on_gpus
from precompute.encoders.config import EncoderConfig
from precompute.images.decode import ImageConfig
from precompute.sources import SourceConfig

GIB = 2**30
NODE = Machine(cores=128, host_bytes=1_024 * GIB, gpus=8, gpu_bytes=75 * GIB)
ALONE = replace(NODE, cores=16, gpus=1, host_bytes=128 * GIB)


def config(device="auto", workers="auto", side=224, dtype="bfloat16") -> BuildConfig:
    return BuildConfig(
        cache="cache",
        source=SourceConfig(kind="folder", path="images"),
        encoder=EncoderConfig(model="model", device=device, compute_dtype=dtype),
        image=ImageConfig(height=side, width=side),
        run=RunConfig(workers=workers),
    )


@pytest.mark.parametrize(
    ("machine", "options", "shards", "crew"),
    [
        (ALONE, {}, 146, Crew(4, 4)),
        (NODE, {}, 146, Crew(32, 32)),
        (NODE, {"device": "cuda:3"}, 146, Crew(4, 32)),  # a rank's: other ranks have the other GPUs, and their cores
        (NODE, {}, 5, Crew(5, 8)),
        (NODE, {}, 0, Crew(1, 8)),
        (replace(ALONE, cores=8), {}, 146, Crew(2, 2)),
        (replace(ALONE, cores=2), {}, 146, Crew(1, 1)),
        (replace(ALONE, host_bytes=12 * GIB), {}, 146, Crew(3, 3)),
        (replace(ALONE, gpu_bytes=20 * GIB), {}, 146, Crew(2, 2)),
        (ALONE, {"side": 512}, 146, Crew(2, 2)),
        (ALONE, {"side": 1024, "dtype": "float32"}, 146, Crew(1, 1)),
        (ALONE, {"workers": 7}, 146, Crew(7, 7)),
    ],
)
def test_workers_on_gpus_follow_from_cores_memory_and_shards(machine, options, shards, crew):
    assert crew_on_gpus(config(**options), shards, machine) == crew


def test_a_text_encoder_has_one_worker_on_each_gpu():
    encoder = EncoderConfig(model="model", max_tokens=512)
    source = SourceConfig(kind="folder", path="images", text="caption")
    texts = replace(config(), source=source, encoder=encoder, image=ImageConfig())
    assert crew_on_gpus(texts, 146, NODE) == Crew(8, 8)
    assert crew_on_gpus(texts, 3, NODE) == Crew(3, 8)


def test_a_cpu_has_a_worker_for_each_pair_of_threads(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 9)
    assert [crew_of(config("cpu"), shards) for shards in (1, 3, 100)] == [Crew(1, 1), Crew(3, 3), Crew(4, 4)]
    assert crew_of(config("cpu", workers=2), 100) == Crew(2, 2)
