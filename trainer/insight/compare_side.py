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
from trainer.run.memory import fit_memory, gpu_uuid, peak_memory_bytes
from trainer.run.parallel import World
from trainer.run.session import Session
from trainer.run.update import Updater


def answer_each(config: TrainConfig, steps: int, world: World, asked: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield the session's announcements; then do `asked` many of the run's first steps, and yield their figures."""
    with redirect_stdout(io.StringIO()) as announced:
        session = Session(replace(config, run=replace(config.run, max_steps=steps)), world).prepare()
        fit_memory(session)
    decided_by = {section: getattr(session.must_match, section) for section in ("caches", "text", "order")}
    yield {"announced": announced.getvalue().splitlines(), "batches": decided_by}
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
