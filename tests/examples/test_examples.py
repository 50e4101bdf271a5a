"""Each example, killed and resumed, on one process or two, trains as the plain one that was never stopped."""

import io
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from cache_store.errors import ConfigError
from tests.command_runs import PROGRAMS
from tests.families import first_and_slow
from tests.make_cache import make_cache
from tests.trainer.runs import meeting_of_two
from trainer import LatentStream

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "plain_pytorch": "torch",
    "stateful_dataloader": "torchdata",
    "accelerate_loop": "accelerate",
    "lightning_loop": "lightning",
    "transformers_trainer": "accelerate",
    "diffusers_lora": "peft",
    "wan_lora": "peft",
}
STEPS, SAVE_EVERY = 150, 25
BATCH = 8
"""Samples per batch; each process prints the first four, which is all of its share if there are two."""

pytestmark = [
    pytest.mark.usefixtures("threads_as_in_a_child"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata, of torch
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),  # Lightning, of torch
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),  # that is what resuming is
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

Steps = dict[int, tuple[float, str]]
"""The loss and the sample numbers of each step, as printed."""


def steps_in(text: str) -> Steps:
    found = re.findall(r"^step (\d+)  loss ([\d.]+)  samples \[([\d, ]+)\] …$", text, re.MULTILINE)
    return {int(step): (float(loss), numbers) for step, loss, numbers in found}


def run(script: str, *options: object) -> str:
    """Run `python examples/SCRIPT.py OPTIONS…` in this process, which has loaded the libraries."""
    pytest.importorskip(NEEDS[script])
    path = EXAMPLES / f"{script}.py"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", [str(path), *map(str, options)])
        runpy.run_path(str(path), run_name="__main__")
    return out.getvalue()


def run_guide(page: str, small: Callable[[list[str]], list[str]]) -> None:
    """Run every command of a guide, made small; of its training, a second command resumes what the first began."""
    said = []
    for command in "".join(re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)).splitlines():
        program, *words = shlex.split(command)
        if program == "python":
            said.append(steps_in(run(Path(words[0]).stem, *words[1:])))
        else:
            assert PROGRAMS[program]([*words, *small(words)]) == 0, command
    first, resumed = said
    assert (max(first), min(resumed), max(resumed)) == (50, 51, 100)


def start(script: str, processes: int, *options: object) -> list[subprocess.Popen[str]]:
    """Start the processes as torchrun does; Lightning starts its second one itself.

    A pipe this small holds some 60 steps; a process then waits until somebody reads on.
    """
    command, ranks = [sys.executable, str(EXAMPLES / f"{script}.py"), *map(str, options)], [{}]
    if script == "lightning_loop":
        command += ["--devices", str(processes)]
    elif processes > 1:
        meeting = meeting_of_two()
        ranks = [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    pipe = {"stdout": subprocess.PIPE, "pipesize": 4096, "text": True}
    return [subprocess.Popen(command, env=os.environ | rank, start_new_session=True, **pipe) for rank in ranks]


def end(processes: list[subprocess.Popen[str]], code: int = 0) -> str:
    """Wait for all; return the first one's output."""
    said = [process.communicate()[0] for process in processes]
    assert {process.returncode for process in processes} == {code}
    return said[0]


def kill_at(step: int, processes: list[subprocess.Popen[str]]) -> str:
    """Kill all once the first one has printed `step`; return its output."""
    said = ""
    while f"step {step} " not in said and (line := processes[0].stdout.readline()):
        said += line
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
    return said + end(processes, -signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    """On a GPU, two runs differ in the last digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    latents = np.random.default_rng(0).standard_normal((60, 4, 6, 5), np.float32)
    return make_cache(tmp_path_factory.mktemp("examples") / "cache", latents, rejected=[2, 40])


@pytest.fixture(scope="module")
def uninterrupted(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    out = tmp_path_factory.mktemp("examples") / "out"
    steps = steps_in(run("plain_pytorch", cache, out, "--steps", STEPS, "--batch-size", BATCH))
    assert list(steps) == list(range(1, STEPS + 1))
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "before", "after"),
    [
        *(("plain_pytorch", 1, 1), ("stateful_dataloader", 1, 1), ("accelerate_loop", 2, 1), ("lightning_loop", 2, 1)),
        ("transformers_trainer", 2, 2),
    ],
)
def test_a_killed_example_goes_on_as_if_never_stopped(cache, tmp_path, uninterrupted, script, before, after):
    """`before` and `after`: processes before and after the kill; sums over two are rounded otherwise."""
    pytest.importorskip(NEEDS[script])
    options = [cache, tmp_path / "out", "--steps", STEPS, "--batch-size", BATCH]
    killed = steps_in(kill_at(SAVE_EVERY + 5, start(script, before, *options)))
    options.append("--resume")
    resumed = steps_in(run(script, *options) if after == 1 else end(start(script, after, *options)))
    assert list(resumed) == list(range(min(resumed), STEPS + 1))
    assert SAVE_EVERY < min(resumed) <= max(killed) + 1
    tolerance = 0 if before == after == 1 else 1e-4
    for step, (loss, numbers) in [*killed.items(), *resumed.items()]:
        assert numbers == uninterrupted[step][1]
        assert loss == pytest.approx(uninterrupted[step][0], rel=tolerance)
    assert "samples" not in run(script, *options), "a resume at the end does nothing"


@pytest.mark.parametrize("dispatch_batches", [True, False])
def test_a_stream_that_accelerate_would_divide_again_is_refused(cache, dispatch_batches):
    prepare = pytest.importorskip("accelerate.data_loader").prepare_data_loader
    options = {"num_processes": 2, "process_index": 0, "dispatch_batches": dispatch_batches, "put_on_device": True}
    stream = LatentStream(cache, BATCH, rank=0, world_size=2)
    with pytest.raises(ConfigError, match="prepared by Accelerate, .* DataLoader"):
        next(iter(prepare(DataLoader(stream, batch_size=1), **options)))


@pytest.mark.parametrize("script", first_and_slow(each for each in NEEDS if not each.endswith("_lora")))
def test_an_example_explains_itself_and_its_errors(cache, tmp_path, script, capsys):
    assert {path.stem for path in EXAMPLES.glob("*.py")} == NEEDS.keys() | {"own_encoder"}  # tested beside this
    with pytest.raises(SystemExit, match="0"):
        run(script, "--help")
    wrong = {
        f"{tmp_path}/none holds no cache; make one with `precompute build`": ("none", "new"),
        "exists; add --resume to continue it": (cache, tmp_path),
    }
    for message, (path, out) in wrong.items():
        with pytest.raises(SystemExit, match="2"):
            run(script, tmp_path / path, tmp_path / out)
        *_, error = capsys.readouterr().err.splitlines()
        assert re.fullmatch(rf"{script}\.py: error: .*{message}.*", error)
