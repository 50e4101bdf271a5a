"""How many workers feed a machine's devices, from cores, GPUs and memory; a number in the config is taken as it is."""

import os
from dataclasses import dataclass

import torch

from cache_store.program.running import usable_cores
from precompute.config import BuildConfig
from precompute.encode.engines.worker import ENCODER_THREADS

CORES_A_WORKER = 4
"""On a GPU: one that launches and writes, and some that decode. More in one process wait for Python's lock."""

WORKERS_A_GPU = 4
"""At most: each has the encoder's weights and a CUDA context of its own."""

CONTEXT_BYTES = 3 * 2**30
"""GPU memory of a worker, whatever its batch: context, weights, libraries' work space."""

BYTES_A_PIXEL = 4_096
"""GPU memory of a batch while it is encoded in bfloat16, for each of its pixels: some twenty tensors of
96 channels at full resolution, twice in float32. Calculated, not measured.
"""

HOST_BYTES = 4 * 2**30
"""Main memory of a worker: torch and CUDA, its batches, and for a minute the canary's weights."""


@dataclass(frozen=True)
class Crew:
    """Workers of one build on this machine."""

    workers: int
    sharing: int
    """By how many workers like these the machine's cores are shared: with those on GPUs that other ranks have."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources that decide how many workers there are."""

    cores: int
    host_bytes: int
    gpus: int
    """That this process sees."""
    gpu_bytes: int
    """Free on each of them."""

    def workers_a_gpu(self, batch_pixels: int, *, is_float32: bool) -> int:
        """How many keep a GPU busy, of those that have cores and room."""
        needed = CONTEXT_BYTES + batch_pixels * BYTES_A_PIXEL * (2 if is_float32 else 1)
        by_cores = self.cores // self.gpus // CORES_A_WORKER
        by_host = self.host_bytes // self.gpus // HOST_BYTES
        return max(1, min(WORKERS_A_GPU, by_cores, by_host, self.gpu_bytes // needed))


def crew_of(config: BuildConfig, shards: int) -> Crew:
    """The workers that can have something to do."""
    device = config.encoder.torch_device
    if device.type != "cuda":
        wanted = config.run.workers
        workers = max(1, torch.get_num_threads() // ENCODER_THREADS) if wanted == "auto" else wanted
        return alone(min(workers, max(1, shards)))
    return crew_on_gpus(config, shards, this_machine(device))


def crew_on_gpus(config: BuildConfig, shards: int, machine: Machine) -> Crew:
    """Count the GPUs that the process sees, or the one it is told to use; each GPU has its share of the cores."""
    if config.run.workers != "auto":
        return alone(min(config.run.workers, max(1, shards)))
    used = machine.gpus if config.encoder.device in ("auto", "cuda") else 1
    if config.encoder.reads_text:  # nothing is decoded, and its weights are many: one keeps a GPU busy
        return Crew(min(used, max(1, shards)), machine.gpus)
    batch_pixels = config.encoder.batch_size * config.image.height * config.image.width
    a_gpu = machine.workers_a_gpu(batch_pixels, is_float32=config.encoder.compute_dtype == "float32")
    workers = min(used * a_gpu, max(1, shards))
    return Crew(workers, -(-workers // used) * machine.gpus)


def alone(workers: int) -> Crew:
    return Crew(workers, workers)


def this_machine(device: torch.device) -> Machine:
    return Machine(
        cores=usable_cores(),
        host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=torch.cuda.device_count(),
        gpu_bytes=torch.cuda.mem_get_info(device)[0],
    )
