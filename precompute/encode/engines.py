"""The engines that build a job's shards; a new one is a module with an `Engine`, and a line in ENGINES."""

import threading
from collections.abc import Callable

from precompute.config import BuildConfig
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.local_engine import run_local
from precompute.encode.ray_cluster import refuse_unreachable_cluster
from precompute.encode.ray_engine import run_ray
from precompute.encoders.encoder import Encoder
from precompute.sources import Source

Engine = Callable[[EncodeJob, Source, Encoder, threading.Event, Callable[[Progress], None]], None]
"""Builds the job's shards, with this source and encoder or with copies opened in workers, and reports every step;
raises Interrupted once the event is set.
"""


def refuse_unreachable_engine(config: BuildConfig) -> None:
    """Raise EncodeOnceError or ConfigError before planning if the engine could not start after it."""
    if config.run.engine == "ray":
        refuse_unreachable_cluster()


ENGINES: dict[str, Engine] = {"local": run_local, "ray": run_ray}
