"""The steps of one side of `trainer compare`, in a process of its own; apart, since it imports torch."""

import io
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, redirect_stdout
from dataclasses import replace
from typing import Any

from cache_store.program.gpu_use import GpuMeter
from trainer.config import TrainConfig
from trainer.data.prefetch import prefetched
from trainer.run.checkpoint import CACHE_IDENTITY, ORDER_KEYS
from trainer.run.inputs import open_inputs
from trainer.run.memory import fit_memory, gpu_uuid, peak_memory_bytes
from trainer.run.parallel import World
from trainer.run.session import open_session
from trainer.run.update import Updater

BATCH_KEYS = (CACHE_IDENTITY, "tokenizer", "chat template", "data.max_text_tokens", *ORDER_KEYS)
"""Keys of `must_match` that decide which samples each step shows."""


def answer_each(config: TrainConfig, steps: int, world: World, asked: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Open the session and yield its announcements; then do each of `asked` many steps, and yield their figures.

    These are the first `steps` steps of the run that the config describes, with its warm-up and schedule.
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
        for count in asked:
            with closing(GpuMeter(gpu_uuid(world.device))) as meter:
                losses, began = list[float | None](), time.perf_counter()
                for _ in range(count):
                    update = updater(next(batches), done)
                    loss = update.metrics["loss"]
                    losses.append(loss if math.isfinite(loss) else None)
                    nonfinite += not update.is_finite
                    done += 1
                seconds, gpu_use = time.perf_counter() - began, meter.take()
            figures = {"seconds": seconds, "peak_bytes": peak_memory_bytes(world.device), "gpu_use": gpu_use}
            yield {"losses": losses, "nonfinite": nonfinite, **figures}
