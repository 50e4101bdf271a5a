"""A real server of the S3 protocol on this machine's loopback, for as long as tests need it."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from urllib.error import URLError

import pytest

from tests.slurm import free_port

PATIENCE_S = 60

WITH_ITS_PARENT = "import ctypes, runpy; ctypes.CDLL(None).prctl(1, 9);"
"""A server dies with the tests, also with tests that are killed: PR_SET_PDEATHSIG, SIGKILL."""

SERVERS = {
    # Keeps objects in memory. Refuses a second create, a stale etag and a wrong SHA-256, as S3 does.
    "ministack": (("ministack",), "runpy.run_module('ministack', run_name='__main__')"),
    # A second opinion on the protocol, but slow, and it takes a wrong SHA-256.
    "moto": (
        ("moto", "flask", "flask_cors"),
        "from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])",
    ),
}
"""The modules that each needs, and what starts it; none checks credentials."""

QUIET = {"LOG_LEVEL": "ERROR", "SFTP_ENABLED": "0", "IOT_MTLS_ENABLED": "0", "DOCKER_HOST": "unix:///nowhere"}
"""Of all that ministack imitates, S3 alone."""


@dataclass(frozen=True)
class Server:
    """Reached at `endpoint`, by plain HTTP."""

    endpoint: str
    _buckets: "count[int]" = field(default_factory=lambda: count(1))

    def new_bucket(self) -> str:
        name = f"bucket-{next(self._buckets)}"
        with urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")):
            return name


@contextmanager
def running_server(kind: str, folder: Path) -> Iterator[Server]:
    """Start one, whose scratch files lie in `folder`; the test is skipped where it is not installed."""
    modules, start = SERVERS[kind]
    if missing := [name for name in modules if find_spec(name) is None]:
        pytest.skip(f"needs {kind}, a server of the S3 protocol: {', '.join(missing)} not installed")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_ITS_PARENT + start.format(port=port)],
        env={**os.environ, **QUIET, "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "TMPDIR": str(folder)},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until_it_answers(process, f"http://127.0.0.1:{port}")
        yield Server(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


def wait_until_it_answers(process: subprocess.Popen[bytes], endpoint: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up and process.poll() is None:
        with suppress(URLError), urllib.request.urlopen(endpoint):
            return
        time.sleep(0.05)
    raise TimeoutError(f"the S3 server does not answer at {endpoint}")


def environment(endpoint: str) -> dict[str, str]:
    """What a program needs to find it."""
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    return {**keys, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}
