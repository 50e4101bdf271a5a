"""Connect to a Ray cluster, or start one on this machine, with Ray's own output silenced."""

import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cache_store.errors import ConfigError, EncodeOnceError
from cache_store.log import log_info
from cache_store.program.running import hold_stop_signals
from precompute.encode.worker import ENCODER_THREADS

NO_TELEMETRY = {"RAY_USAGE_STATS_ENABLED": "0"}
"""Ray's environment, unless set otherwise: it sends no usage statistics."""

LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment of a Ray that we start: it listens on the loopback interface only, as on Windows and macOS."""

OBJECT_STORE_BYTES = 100 * 2**20
"""Object store of a Ray that we start: small, because no pixels pass through it."""

TOKEN_HINT = "; if the cluster asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)"
"""Added to the error if something answers but refuses us: Ray gives no reason then."""

HEAD_CHECK_S = 1.0
"""Seconds between two checks that the cluster's head answers."""

PROBE_S = 5.0
"""Seconds for a cluster to answer; Ray itself would wait two minutes and ignore signals."""


@dataclass(frozen=True)
class RayCluster:
    """A cluster that this process is connected to."""

    ray: Any
    """The `ray` module, an extra."""
    is_local: bool
    """Whether it is this machine only, started for this build."""

    def totals(self) -> dict[str, int]:
        """Count the CPUs and GPUs that the cluster has now."""
        return {name: int(self.ray.cluster_resources().get(name, 0)) for name in ("CPU", "GPU")}

    def slots(self, resources: Mapping[str, int]) -> int:
        """Count the workers with these resources that the cluster has room for now, at least 1."""
        totals = self.totals()
        return max(1, totals["GPU"] if resources["num_gpus"] else totals["CPU"] // resources["num_cpus"])


class ClusterHead:
    """The head of a cluster, at HOST:PORT."""

    def __init__(self, address: str) -> None:
        self._address, self.is_reachable = address, True

    def watch(self, over: threading.Event) -> None:
        """Check every HEAD_CHECK_S, in a thread: a Ray call may block until Ray kills this process after a minute."""
        while not over.wait(HEAD_CHECK_S):
            self.check()

    def check(self) -> None:
        """Update `is_reachable`; print a message when the head stops to answer."""
        before = self.is_reachable
        try:
            refuse_no_answer(self._address)
            self.is_reachable = True
        except EncodeOnceError:
            self.is_reachable = False
        if before and not self.is_reachable:
            log_info(
                f"the head of the Ray cluster, {self._address}, no longer answers; if Ray kills this program, "
                "committed shards are kept: run the same command again to go on"
            )


@contextmanager
def connected(cpus: int) -> Iterator[RayCluster]:
    """Connect to the cluster at RAY_ADDRESS, or start a local one with `cpus` CPUs; EncodeOnceError if that fails.

    A connection that this process already has is used, and kept.
    """
    address = os.environ.get("RAY_ADDRESS") or "local"
    is_local = address == "local"
    for name, value in (NO_TELEMETRY | LOOPBACK_ONLY if is_local else NO_TELEMETRY).items():
        os.environ.setdefault(name, value)
    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        yield RayCluster(ray, is_local=False)
        return
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "error"}
    if is_local:
        log_info("RAY_ADDRESS is not set: starting Ray on this machine only")
        options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    else:
        refuse_no_answer(address)
    init_ray(ray, options)
    try:
        yield RayCluster(ray, is_local)
    finally:
        ray.shutdown()


def refuse_unreachable_cluster() -> None:
    """Refuse an address as `connected` does, without importing Ray; call it before planning, which may take an hour."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address and not ("ray" in sys.modules and sys.modules["ray"].is_initialized()):
        refuse_no_answer(address)


def refuse_no_answer(address: str) -> None:
    """Raise EncodeOnceError within PROBE_S if nothing answers at the address, ConfigError if no build can use it."""
    if "://" in address:
        remedy = "run the build in the cluster, by `ray job submit`, or set it to HOST:PORT"
        raise ConfigError(f"RAY_ADDRESS is {address}, but Ray offers a build no actors at such an address; {remedy}")
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise ConfigError(f"RAY_ADDRESS is {address}; expected HOST:PORT, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise EncodeOnceError(f"RAY_ADDRESS: no Ray cluster answers at {address} ({error})") from None


def init_ray(ray: Any, options: Mapping[str, Any]) -> None:
    """Call `ray.init`; raise its errors as EncodeOnceError, and keep our signal handlers.

    Processes that Ray starts ignore SIGTERM, as they ignore Ctrl-C: batch systems send it to all processes, and if
    Ray's ended first, ours would fail in the middle of stopping. They end with ours, or when they are killed.
    """
    before = signal.getsignal(signal.SIGTERM)
    with hold_stop_signals():
        try:
            ray.init(**options)
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            remedy = TOKEN_HINT if isinstance(error, ConnectionError) else ""
            raise EncodeOnceError(f"Ray at {options['address']}: {first_line(error)}{remedy}") from None
        finally:
            signal.signal(signal.SIGTERM, before)


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def worker_resources(device: str, cluster: RayCluster) -> dict[str, int]:
    """Return a worker's Ray resources: a GPU, or ENCODER_THREADS cores for an encoder without one."""
    totals = cluster.totals()
    if device == "cuda" or (device == "auto" and totals["GPU"]):
        if cluster.is_local and not totals["GPU"]:
            raise ConfigError(
                "encoder.device is 'cuda', but Ray finds no GPU on this machine; set RAY_ADDRESS to use a cluster"
            )
        return {"num_gpus": 1, "num_cpus": 0}
    return {"num_gpus": 0, "num_cpus": ENCODER_THREADS}


def say_waiting(resources: Mapping[str, int], totals: Mapping[str, int]) -> None:
    """Say why no worker has started yet."""
    kind = "GPU" if resources["num_gpus"] else "CPU"
    wanted = resources["num_gpus"] or resources["num_cpus"]
    has = " and ".join(f"{count} {name}s" for name, count in totals.items())
    why = (
        ", perhaps in use"
        if totals[kind] >= wanted
        else ", too few: add a node, or stop this (Ctrl-C) and run the same command again on another cluster"
    )
    log_info(f"waiting for a worker to start, on {wanted} {kind}{'s' * (wanted > 1)}; the Ray cluster has {has}{why}")
