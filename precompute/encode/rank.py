"""Choose the shards that this process builds, by options or the launcher's environment; no process asks another."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cache_store.errors import ConfigError

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE")
SRUN_VARIABLES = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS")
ARRAY_VARIABLES = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT")
JOB_VARIABLES = ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS")
"""Environment variables of each launcher. Kubernetes sets only the first of its own, the Job's manifest the second."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of `world_size` processes, on any machines, that build a cache together; a rerun may change the size."""

    index: int
    world_size: int
    local: int | None = None
    """Number on its node, if a launcher started several ranks there; each then uses one GPU."""

    def __str__(self) -> str:
        return f"rank {self.index} of {self.world_size}"

    def shards_of(self, shards: Iterable[int]) -> list[int]:
        return [shard for shard in shards if shard % self.world_size == self.index]


def find_rank(index: str | None, world_size: str | None, environment: Mapping[str, str]) -> Rank | None:
    """Find this process's rank from the options typed, else from the launcher; None for a single-process build.

    An array task counts as one rank per process that it starts.
    """
    typed = {"--rank": index, "--world-size": world_size}
    if index is not None or world_size is not None:
        if missing := [name for name, value in typed.items() if value is None]:
            raise ConfigError(f"--rank and --world-size go together; {missing[0]} is missing")
        rank = read_rank("--rank", "--world-size", typed)
    else:
        task, process = array_task(environment), launcher_rank(environment)
        whole, world = task.index * process.world_size + process.index, task.world_size * process.world_size
        rank = Rank(index=whole, world_size=world, local=process.local)
    return rank if rank.world_size > 1 else None


def launcher_rank(environment: Mapping[str, str]) -> Rank:
    """Read the rank of torchrun (in a pod, too), else of srun, else of Kubernetes."""
    if environment.keys() >= {*TORCHRUN_VARIABLES}:
        shares_node = read_number("LOCAL_WORLD_SIZE", environment, 1) > 1
        local = read_number("LOCAL_RANK", environment, 0) if shares_node else None
        return read_rank("RANK", "WORLD_SIZE", environment, local)
    if environment.keys() >= {*SRUN_VARIABLES}:
        shares_node = read_number("SLURM_NTASKS", environment) > read_number("SLURM_STEP_NUM_NODES", environment, 1)
        local = read_number("SLURM_LOCALID", environment, 0) if shares_node else None
        return read_rank("SLURM_PROCID", "SLURM_NTASKS", environment, local)
    if environment.keys() >= {*JOB_VARIABLES}:
        return read_rank(*JOB_VARIABLES, environment)
    if environment.get("WORLD_SIZE") != "1":
        refuse_incomplete_variables(environment, "torchrun", TORCHRUN_VARIABLES)
    if "SLURM_STEP_ID" in environment or environment.get("SLURM_PROCID", "0") != "0":  # 0 in a batch script
        refuse_incomplete_variables(environment, "srun", SRUN_VARIABLES)
    refuse_incomplete_variables(environment, "an Indexed Job of Kubernetes", JOB_VARIABLES, "needs both")
    return Rank(index=0, world_size=1)


def array_task(environment: Mapping[str, str]) -> Rank:
    """Read the task's position in its Slurm array; array ids may start at any number."""
    if not environment.keys() >= {*ARRAY_VARIABLES}:
        refuse_incomplete_variables(environment, "a Slurm array", ARRAY_VARIABLES)
        return Rank(index=0, world_size=1)
    task, count = (read_number(name, environment) for name in ARRAY_VARIABLES)
    first = read_number("SLURM_ARRAY_TASK_MIN", environment, 0)
    step = read_number("SLURM_ARRAY_TASK_STEP", environment, 1)
    last = read_number("SLURM_ARRAY_TASK_MAX", environment, first + step * (count - 1))
    ids = range(first, last + 1, max(1, step))
    if task not in ids or len(ids) != count:  # uneven ids: all tasks refuse, so that no subset builds alone
        raise ConfigError(
            f"the {count} ids of this Slurm array are not {first} to {last} in steps of {ids.step} "
            f"(SLURM_ARRAY_TASK_ID is {task}); submit an array such as 0-{count - 1}, or give --rank and --world-size"
        )
    return Rank(index=ids.index(task), world_size=count)


def refuse_incomplete_variables(
    environment: Mapping[str, str], launcher: str, names: Iterable[str], rule: str = "sets them together"
) -> None:
    """Raise ConfigError if only some of these variables are set; each process would build everything on its own."""
    held = [f"{name}={environment[name]}" for name in names if name in environment]
    missing = [name for name in names if name not in environment]
    if held:
        raise ConfigError(
            f"{' and '.join(held)} without {' and '.join(missing)}, although {launcher} {rule}. If this is "
            "one of several processes, give --rank R --world-size N; for a single-process build, give --rank 0 "
            "--world-size 1"
        )


def read_number(name: str, values: Mapping[str, str | None], default: int | None = None) -> int:
    text = values.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name} must be a whole number from 0, got {text!r}")
    return int(text)


def read_rank(index_name: str, size_name: str, values: Mapping[str, str | None], local: int | None = None) -> Rank:
    index, world_size = read_number(index_name, values), read_number(size_name, values)
    if not index < world_size:
        raise ConfigError(f"{index_name} must be in [0, {size_name}), got {index} of {world_size}")
    return Rank(index=index, world_size=world_size, local=local)
