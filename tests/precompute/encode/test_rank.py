"""The shards that a process builds, from typed options and launchers' variables, and its number of workers."""

from dataclasses import replace

import pytest

from cache_store.errors import ConfigError
from precompute.config import BuildConfig, RunConfig
from precompute.encode.crew import Machine, crew_of, crew_on_gpus
from precompute.encode.rank import find_rank
from precompute.encoders.encoder_config import EncoderConfig
from precompute.images.config import ImageConfig
from precompute.sources.config import SourceConfig

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
ON_TWO, ON_FOUR = ({**STEP, "SLURM_STEP_NUM_NODES": nodes} for nodes in "24")


def array(task, count, first=0, step=1, **more):
    values = {"ID": task, "COUNT": count, "MIN": first, "STEP": step, **more}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


def job(index, completions=None):
    values = {"JOB_COMPLETION_INDEX": index, "JOB_COMPLETIONS": completions}
    return {name: str(value) for name, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("typed", "environment", "found"),
    [
        ((None, None), {}, None),
        (("1", "3"), {}, (1, 3, None)),
        (("0", "1"), TORCHRUN | array(1, 2), None),
        (("2", "3"), TORCHRUN | array(1, 2), (2, 3, None)),
        ((None, None), TORCHRUN, (5, 8, 1)),
        ((None, None), {"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, None)),
        ((None, None), {"WORLD_SIZE": "8"} | ON_TWO, (3, 4, 1)),
        ((None, None), BATCH, None),
        ((None, None), ON_TWO, (3, 4, 1)),
        ((None, None), ON_FOUR, (3, 4, None)),
        ((None, None), array(2, 4), (2, 4, None)),
        ((None, None), array(3, 4, step=3, MAX=9), (1, 4, None)),
        ((None, None), array(1, 2) | ON_TWO, (7, 8, 1)),
        ((None, None), job(2, 4), (2, 4, None)),
        ((None, None), job(1, 2) | TORCHRUN, (5, 8, 1)),
    ],
)
def test_a_rank_is_what_was_typed_or_what_launchers_say(typed, environment, found):
    rank = find_rank(*typed, environment)
    assert (rank and (rank.index, rank.world_size, rank.local)) == found


@pytest.mark.parametrize(
    ("typed", "environment", "named"),
    [
        (("1", None), {}, ["--world-size"]),
        (("2", "2"), {}, ["--rank", "2 of 2"]),
        ((None, None), {"RANK": "one", "WORLD_SIZE": "2"}, ["RANK", "one"]),
        ((None, None), {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "RANK"]),
        ((None, None), {"SLURM_PROCID": "3"}, ["SLURM_PROCID=3", "SLURM_STEP_ID", "SLURM_NTASKS"]),
        ((None, None), {"SLURM_ARRAY_TASK_ID": "3"}, ["SLURM_ARRAY_TASK_ID=3", "SLURM_ARRAY_TASK_COUNT"]),
        ((None, None), job(0), ["JOB_COMPLETION_INDEX=0 without JOB_COMPLETIONS", "--rank 0 --world-size 1"]),
        ((None, None), array(0, 3, MAX=5), ["0 to 5"]),
    ],
)
def test_a_rank_that_cannot_be_is_refused(typed, environment, named):
    with pytest.raises(ConfigError) as caught:
        find_rank(*typed, environment)
    assert [each for each in named if each not in str(caught.value)] == []


# The number of workers on a machine.

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
