"""Which of a build's shards this process takes, by what was typed or by what a launcher says of it; no process asks
another.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cache_store.errors import ConfigError

OF_TORCHRUN = ("RANK", "WORLD_SIZE")
OF_SRUN = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS")
OF_ARRAY = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT")
"""Variables that each sets, all of them."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of `world_size` processes, on any machines, that build a cache together; a rerun may have another number."""

    index: int
    world_size: int
    local: int | None = None
    """Its number on its node, where a launcher started several there: each takes one GPU."""

    def __str__(self) -> str:
        return f"rank {self.index} of {self.world_size}"

    def shards_of(self, shards: Iterable[int]) -> list[int]:
        """Those of `shards` that are this rank's."""
        return [shard for shard in shards if shard % self.world_size == self.index]


def find_rank(index: str | None, world_size: str | None, environment: Mapping[str, str]) -> Rank | None:
    """The rank that was typed, or else that of torchrun or srun, in an array or not; None for a build alone.

    Every task of a Slurm array counts as a rank, or as many as it starts.
    """
    typed = {"--rank": index, "--world-size": world_size}
    if index is not None or world_size is not None:
        if missing := [name for name, value in typed.items() if value is None]:
            raise ConfigError(f"--rank and --world-size go together; {missing[0]} is missing")
        return several(checked(number("--rank", typed), number("--world-size", typed), "--rank", "--world-size"))
    task, process = of_array(environment), of_launcher(environment)
    whole = task.index * process.world_size + process.index
    return several(Rank(index=whole, world_size=task.world_size * process.world_size, local=process.local))


def several(rank: Rank) -> Rank | None:
    return rank if rank.world_size > 1 else None


def of_launcher(environment: Mapping[str, str]) -> Rank:
    """What torchrun says, or else srun, which tells its steps alone that they are steps."""
    if environment.keys() >= {*OF_TORCHRUN}:
        several_here = number("LOCAL_WORLD_SIZE", environment, 1) > 1
        local = number("LOCAL_RANK", environment, 0) if several_here else None
        return checked(number("RANK", environment), number("WORLD_SIZE", environment), "RANK", "WORLD_SIZE", local)
    if environment.keys() >= {*OF_SRUN}:
        tasks, nodes = number("SLURM_NTASKS", environment), number("SLURM_STEP_NUM_NODES", environment, 1)
        local = number("SLURM_LOCALID", environment, 0) if tasks > nodes else None
        return checked(number("SLURM_PROCID", environment), tasks, "SLURM_PROCID", "SLURM_NTASKS", local)
    if environment.get("WORLD_SIZE") != "1":
        refuse_half_said(environment, "torchrun", OF_TORCHRUN)
    if "SLURM_STEP_ID" in environment or environment.get("SLURM_PROCID", "0") != "0":  # a batch script has number 0
        refuse_half_said(environment, "srun", OF_SRUN)
    return Rank(index=0, world_size=1)


def of_array(environment: Mapping[str, str]) -> Rank:
    """The place of a task in its array, whose ids may begin anywhere."""
    if not environment.keys() >= {*OF_ARRAY}:
        refuse_half_said(environment, "a Slurm array", OF_ARRAY)
        return Rank(index=0, world_size=1)
    task, count = number("SLURM_ARRAY_TASK_ID", environment), number("SLURM_ARRAY_TASK_COUNT", environment)
    first, step = number("SLURM_ARRAY_TASK_MIN", environment, 0), number("SLURM_ARRAY_TASK_STEP", environment, 1)
    last = number("SLURM_ARRAY_TASK_MAX", environment, first + step * (count - 1))
    ids = range(first, last + 1, max(1, step))
    if task not in ids or len(ids) != count:  # of uneven ids, every task refuses: none builds while others do not
        raise ConfigError(
            f"SLURM_ARRAY_TASK_ID {task} is one of {count} ids that are not those from {first} to {last} in steps of "
            f"{ids.step}; submit an array such as 0-{count - 1}, or name --rank and --world-size"
        )
    return Rank(index=ids.index(task), world_size=count)


def refuse_half_said(environment: Mapping[str, str], launcher: str, names: Iterable[str]) -> None:
    """ConfigError where some of the variables are set: each of many processes would build everything, alone."""
    held = [f"{name}={environment[name]}" for name in names if name in environment]
    missing = [name for name in names if name not in environment]
    if held:
        raise ConfigError(
            f"{' and '.join(held)} without {' and '.join(missing)}, which {launcher} sets too: is this one of several? "
            "Name it by --rank R --world-size N; --rank 0 --world-size 1 is a build alone"
        )


def number(name: str, values: Mapping[str, str | None], default: int | None = None) -> int:
    """Read a whole number, not negative; ConfigError naming what holds something else."""
    text = values.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name} must be a whole number from 0, got {text!r}")
    return int(text)


def checked(index: int, world_size: int, index_name: str, size_name: str, local: int | None = None) -> Rank:
    if not index < world_size:
        raise ConfigError(f"{index_name} must be in [0, {size_name}), got {index} of {world_size}")
    return Rank(index=index, world_size=world_size, local=local)
