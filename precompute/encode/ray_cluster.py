"""Reaching a Ray cluster, or starting one on this machine, without letting Ray talk over us."""

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
from cache_store.program.running import stop_signals_held
from precompute.encode.worker import ENCODER_THREADS

QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
"""Ray's environment, where it has no other: nothing is sent to its makers."""

ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's environment for one of our own: it then listens on the loopback interface only, as it does on those systems."""

OBJECT_STORE_BYTES = 100 * 2**20
"""Of a Ray of our own: no pixels pass through it."""

TOKEN = "; where the cluster asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)"
"""Ray names no reason where something answers, but not to us."""

LOOKED_S = 1.0
"""Between two looks at whether the cluster's head is there."""

PROBE_S = 5.0
"""For a cluster to answer: Ray itself would wait for two minutes, deaf to signals."""


@dataclass(frozen=True)
class RayCluster:
    """A cluster that this process is connected to."""

    ray: Any
    """The module, an extra."""
    own: bool
    """Whether it is this machine alone, started for this build."""

    def totals(self) -> dict[str, int]:
        """CPUs and GPUs that there are now."""
        return {name: int(self.ray.cluster_resources().get(name, 0)) for name in ("CPU", "GPU")}

    def slots(self, place: Mapping[str, int]) -> int:
        """Workers that it has room for now, at least one."""
        totals = self.totals()
        return max(1, totals["GPU"] if place["num_gpus"] else totals["CPU"] // place["num_cpus"])


class ClusterHead:
    """The head of a cluster, at HOST:PORT."""

    def __init__(self, address: str) -> None:
        self._address, self.answers = address, True

    def watch(self, over: threading.Event) -> None:
        """Look at it each second, in a thread: a call of Ray's may wait for it, until Ray ends us after a minute."""
        while not over.wait(LOOKED_S):
            self.look()

    def look(self) -> None:
        """Whether it answers; told once when it does not."""
        before = self.answers
        try:
            refuse_silent(self._address)
            self.answers = True
        except EncodeOnceError:
            self.answers = False
        if before and not self.answers:
            log_info(
                f"the head of the Ray cluster, {self._address}, does not answer any more; if Ray ends this program, "
                "committed shards are kept: run the same command again to go on"
            )


@contextmanager
def connected(cpus: int) -> Iterator[RayCluster]:
    """Connect to the cluster of RAY_ADDRESS, or start one here, of so many CPUs; EncodeOnceError if that fails.

    A process that is connected already stays so.
    """
    address = os.environ.get("RAY_ADDRESS") or "local"
    own = address == "local"
    for name, value in (QUIET | ALONE if own else QUIET).items():
        os.environ.setdefault(name, value)
    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        yield RayCluster(ray, own=False)
        return
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "error"}
    if own:
        log_info("RAY_ADDRESS is not set: a Ray of this machine alone")
        options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    else:
        refuse_silent(address)
    begin(ray, options)
    try:
        yield RayCluster(ray, own)
    finally:
        ray.shutdown()


def refuse_no_cluster() -> None:
    """As `connected` does, but without loading Ray: before a plan is made, which may take an hour."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address and not ("ray" in sys.modules and sys.modules["ray"].is_initialized()):
        refuse_silent(address)


def refuse_silent(address: str) -> None:
    """EncodeOnceError, soon, where nothing answers at the address; ConfigError for one that no build can use."""
    if "://" in address:
        remedy = "run the build in the cluster, by `ray job submit`, or name its HOST:PORT"
        raise ConfigError(f"RAY_ADDRESS is {address}, by which Ray lends no actors to a build; {remedy}")
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise ConfigError(f"RAY_ADDRESS is {address}; expected HOST:PORT, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise EncodeOnceError(f"RAY_ADDRESS: no Ray cluster answers at {address} ({error})") from None


def begin(ray: Any, options: Mapping[str, Any]) -> None:
    """`ray.init`, whose errors are the user's to mend, and which leaves signals as they were.

    Processes that it starts are deaf to SIGTERM, as Ray makes them to Ctrl-C: batch systems send it to all, and ours
    would end with them, in the middle of stopping. They end with ours, or when they are killed.
    """
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals_held():
        try:
            ray.init(**options)
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            remedy = TOKEN if isinstance(error, ConnectionError) else ""
            raise EncodeOnceError(f"Ray at {options['address']}: {first_line(error)}{remedy}") from None
        finally:
            signal.signal(signal.SIGTERM, before)


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def place_of_worker(device: str, cluster: RayCluster) -> dict[str, int]:
    """What a worker asks of a node: a GPU, or cores for an encoder without one."""
    totals = cluster.totals()
    if device == "cuda" or (device == "auto" and totals["GPU"]):
        if cluster.own and not totals["GPU"]:
            raise ConfigError(
                "encoder.device is 'cuda', but Ray finds no GPU on this machine; RAY_ADDRESS names others"
            )
        return {"num_gpus": 1, "num_cpus": 0}
    return {"num_gpus": 0, "num_cpus": ENCODER_THREADS}


def say_waiting(place: Mapping[str, int], totals: Mapping[str, int]) -> None:
    """Tell why nothing happens."""
    kind, wanted = ("GPU", place["num_gpus"]) if place["num_gpus"] else ("CPU", place["num_cpus"])
    has = " and ".join(f"{count} {name}s" for name, count in totals.items())
    why = (
        ", perhaps in use"
        if totals[kind] >= wanted
        else ", too few: a node has to join it, or stop this (Ctrl-C) and run the same command again on another"
    )
    log_info(f"waiting for a worker to start, on {wanted} {kind}{'s' * (wanted > 1)}; the Ray cluster has {has}{why}")
