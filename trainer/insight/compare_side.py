"""One rank of a side of `trainer compare`, in its own process: `python -m trainer.insight.compare_side STEPS OPTION…`.

The options are those of `trainer train`. Each line on standard input is a number of steps to do. The first line of
output tells that the side is open, each later one is the answer to a line of input; all are JSON.
"""

import io
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from dataclasses import replace
from typing import Any

from cache_store.errors import EncodeOnceError
from cache_store.program.command_line import parse_config
from cache_store.program.gpu_use import GpuMeter
from cache_store.program.running import ignore_stop_signals
from trainer.config import TrainConfig
from trainer.data.prefetch import prefetched
from trainer.run.checkpoint import CACHE_IDENTITY, ORDER_KEYS
from trainer.run.inputs import open_inputs
from trainer.run.memory import fit_memory, gpu_uuid, peak_memory_bytes
from trainer.run.parallel import World, join_world
from trainer.run.session import open_session
from trainer.run.update import Updater

BATCH_KEYS = (CACHE_IDENTITY, "tokenizer", "chat template", "data.max_text_tokens", *ORDER_KEYS)
"""Keys of `must_match` that decide which samples each step shows."""


def main() -> None:
    ignore_stop_signals()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    steps, config = int(sys.argv[1]), parse_config(TrainConfig, sys.argv[2:])
    try:
        with join_world() as world:
            for answer in answer_each(config, steps, world):
                print(json.dumps(answer), file=answers, flush=True)
    except EncodeOnceError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)


def answer_each(config: TrainConfig, steps: int, world: World) -> Iterator[dict[str, Any]]:
    """Open the session, and do as many steps as each line asks for; `steps` in all.

    They are the first steps of the run that the config describes, with its warm-up and schedule.
    """
    with redirect_stdout(io.StringIO()) as announced:
        inputs = open_inputs(replace(config, run=replace(config.run, max_steps=steps)), world)
        session = fit_memory(open_session(inputs))
    yield {
        "announced": announced.getvalue().splitlines(),
        "batches": {key: inputs.must_match.get(key) for key in BATCH_KEYS},
    }
    total = config.run.total_steps(len(session.split.train), config.data.batch_size)
    updater, done, nonfinite = Updater(session, max(steps, total)), 0, 0
    with closing(prefetched(session.loader, range(steps), session.loader.threads)) as batches:
        for line in sys.stdin:
            with closing(GpuMeter(gpu_uuid(world.device))) as meter:
                losses, began = list[float | None](), time.perf_counter()
                for _ in range(int(line)):
                    update = updater(next(batches), done)
                    loss = update.metrics["loss"]
                    losses.append(loss if math.isfinite(loss) else None)
                    nonfinite += not update.is_finite
                    done += 1
                seconds, gpu_use = time.perf_counter() - began, meter.take()
            figures = {"seconds": seconds, "peak_bytes": peak_memory_bytes(world.device), "gpu_use": gpu_use}
            yield {"losses": losses, "nonfinite": nonfinite, **figures}


if __name__ == "__main__":
    main()
