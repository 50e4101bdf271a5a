"""How many workers a build has on this machine: by its cores, GPUs and memory, unless the config sets it."""

import os
from dataclasses import dataclass

import torch

from cache_store.program.running import usable_cores
from precompute.config import BuildConfig
from precompute.encode.worker import ENCODER_THREADS
from precompute.images.buckets import most_pixels

CORES_A_WORKER = 4
"""Cores of a worker on a GPU: one launches and writes, the others decode. More would wait for Python's lock."""

WORKERS_A_GPU = 4
"""Most workers on a GPU: each has its own CUDA context and copy of the encoder's weights."""

CONTEXT_BYTES = 3 * 2**30
"""GPU memory of a worker without its batches: context, weights, libraries' work space."""

BYTES_A_PIXEL = 4_096
"""GPU memory of a batch, for each of its pixels, while it is encoded in bfloat16: some twenty tensors of 96 channels
at full resolution; float32 takes twice as much. Calculated, not measured.
"""

HOST_BYTES = 4 * 2**30
"""Main memory of a worker: torch and CUDA, its batches, and for a minute the canary's weights."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources that decide how many workers there are."""

    cores: int
    host_bytes: int
    gpus: int
    """GPUs that this process sees."""
    gpu_bytes: int
    """Free memory of each GPU."""


def crew_of(config: BuildConfig, shards: int) -> tuple[int, int]:
    """Choose the number of workers; also return how many share the machine's cores, on other ranks' GPUs, too."""
    device, most = config.encoder.torch_device, max(1, shards)
    if config.run.workers != "auto":
        workers = min(config.run.workers, most)
        return workers, workers
    if device.type == "cuda":
        return crew_on_gpus(config, most, measure_machine(device))
    workers = min(max(1, torch.get_num_threads() // ENCODER_THREADS), most)
    return workers, workers


def crew_on_gpus(config: BuildConfig, most: int, machine: Machine) -> tuple[int, int]:
    """Choose the workers for the GPUs seen or named; each GPU of the machine gets its share of the cores."""
    used = machine.gpus if config.encoder.device in ("auto", "cuda") else 1
    if config.kind != "image":  # one worker keeps a GPU busy with texts or a clip, and takes much of its memory
        return min(used, most), machine.gpus
    batch_pixels = config.encoder.batch_size * most_pixels(config.image.rule)
    needed = CONTEXT_BYTES + batch_pixels * BYTES_A_PIXEL * (2 if config.encoder.compute_dtype == "float32" else 1)
    by_cores = machine.cores // machine.gpus // CORES_A_WORKER
    by_host = machine.host_bytes // machine.gpus // HOST_BYTES
    a_gpu = max(1, min(WORKERS_A_GPU, by_cores, by_host, machine.gpu_bytes // needed))
    workers = min(used * a_gpu, most)
    return workers, -(-workers // used) * machine.gpus


def measure_machine(device: torch.device) -> Machine:
    return Machine(
        cores=usable_cores(),
        host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=torch.cuda.device_count(),
        gpu_bytes=torch.cuda.mem_get_info(device)[0],
    )
