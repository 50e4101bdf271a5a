"""The memory that a step took, and the largest pass that fits, found by trying the longest samples of the run."""

import os
import resource
import sys
from dataclasses import replace

import numpy as np
import torch

from cache_store.errors import EncodeOnceError
from trainer.data.batches import StepBatch
from trainer.data.draws import as_tensors
from trainer.run.session import Session
from trainer.run.update import Updater


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most that was allocated on a GPU since the last call; on a CPU, the process's peak so far."""
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def gpu_uuid(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


NO_MEMORY = ("out of memory", "can't allocate memory", "could not create a primitive")
"""Parts of messages: torch's on a GPU, on a CPU, and oneDNN's."""


def fit_memory(session: Session) -> None:
    """If run.fit_memory is set, cut each rank's share into as few passes as fit; EncodeOnceError if no sample fits."""
    if not session.config.run.fit_memory:
        return
    share = session.config.data.batch_size // session.world.size
    by_length = session.split.train[np.argsort(session.text.lengths(session.split.train), kind="stable")]
    largest = largest_image(session)
    for passes in (count for count in range(1, share + 1) if share % count == 0):
        samples = share // passes
        longest = np.resize(by_length[-samples:], samples)
        failed = torch.tensor(float(not fits(session, longest, largest)), device=session.world.device)
        if not session.world.sum(failed):
            session.world.say(
                f"run.fit_memory: data.accumulate {passes}, since {samples} of the longest samples fit into one pass"
            )
            session.loader = replace(session.loader, accumulate=passes)
            return
    raise EncodeOnceError(
        "run.fit_memory: not even one sample a pass fits; set run.gradient_checkpointing: full and run.loss_chunk: 512"
    )


def largest_image(session: Session) -> int:
    stream, train = session.loader.stream, session.split.train
    each_size = train[np.unique(stream.sizes.indices(train), return_index=True)[1]]
    counts = [session.projectors.count(as_tensors(stream.source.read(each_size[[at]]))) for at in range(len(each_size))]
    return int(each_size[np.argmax(counts)])


def fits(session: Session, numbers: np.ndarray, largest: int) -> bool:
    """Return whether a pass over these samples fits; `largest` stands in for all latents."""
    batch = session.loader.load(numbers, np.full_like(numbers, largest))
    updater = Updater(session, 1)
    try:
        alone = replace(session.world, size=1)
        updater.world = alone
        every_loss = session.config.optim.reconstruction.every - 1  # a step at which every loss is due
        updater.compute_gradients(StepBatch(numbers, session.text.label_tokens(numbers), 0, [batch]), every_loss)
    except RuntimeError as error:
        if not any(words in str(error) for words in NO_MEMORY):
            raise
        return False
    finally:
        updater.optimizer.zero_grad()
        if session.world.device.type == "cuda":
            torch.cuda.empty_cache()
    return True
