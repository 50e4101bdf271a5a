"""The shards that a process builds: a table of typed options and launchers' variables."""

import pytest

from cache_store.errors import ConfigError
from precompute.encode.rank import find_rank

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
