"""Who takes the shards of a job; a new engine is a module with such a function and a line in ENGINES."""

import threading
from collections.abc import Callable

from precompute.config import BuildConfig
from precompute.encode.job import EncodeJob, Progress
from precompute.encode.local_engine import run_local
from precompute.encode.ray_cluster import refuse_no_cluster
from precompute.encode.ray_engine import run_ray
from precompute.encoders.encoder import Encoder
from precompute.sources import Source

Engine = Callable[[EncodeJob, Source, Encoder, threading.Event, Callable[[Progress], None]], None]
"""Builds the job's shards, with this source and encoder or with others like them, and tells of every step; Interrupted
once the event is set.
"""


def refuse_no_engine(config: BuildConfig) -> None:
    """EncodeOnceError or ConfigError, soon, where an engine could not begin once all is planned."""
    if config.run.engine == "ray":
        refuse_no_cluster()


ENGINES: dict[str, Engine] = {"local": run_local, "ray": run_ray}
