"""Real servers of the protocols of S3 and Azure on this machine's loopback, for as long as tests need them."""

import base64
import hmac
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

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

AZURITE = "import os; os.execvp('azurite-blob', ['azurite-blob', '--blobPort', '{port}', '--inMemoryPersistence', "
AZURITE += "'--silent', '--disableTelemetry'])"
"""Microsoft's own server of Azure's protocol, which checks credentials: the same process goes on as node."""

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every Azurite, as its documentation gives them."""

BEARER = "token"
"""What the tests' GCS takes."""

OTHERS = ("gs", "az")
EVERY_STORE = pytest.mark.parametrize("scheme", ["s3", *OTHERS])
"""Of a test that takes `bucket`: it runs once for each kind of store."""

QUIET = {"LOG_LEVEL": "ERROR", "SFTP_ENABLED": "0", "IOT_MTLS_ENABLED": "0", "DOCKER_HOST": "unix:///nowhere"}
"""Of all that ministack imitates, S3 alone."""


@dataclass(frozen=True)
class Server:
    """Reached at `endpoint`, by plain HTTP."""

    endpoint: str
    _buckets: "count[int]" = field(default_factory=lambda: count(1))

    def new_bucket(self) -> str:
        name = f"bucket-{next(self._buckets)}"
        with urlopen(self._creating(name)):
            return name

    def _creating(self, name: str) -> Request:
        return Request(f"{self.endpoint}/{name}", method="PUT")


class Azurite(Server):
    """Buckets are containers of its one account."""

    def _creating(self, name: str) -> Request:
        """Signed with the account's key."""
        known = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in known.items())]
        lines += [f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
        signed = hmac.digest(base64.b64decode(ACCOUNT_KEY), "\n".join(lines).encode(), "sha256")
        headers = {**known, "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"}
        return Request(f"{self.endpoint}/{ACCOUNT}/{name}?restype=container", method="PUT", headers=headers)


@contextmanager
def running_server(kind: str, folder: Path) -> Iterator[Server]:
    """Start one, whose scratch files lie in `folder`; the test is skipped where it is not installed."""
    modules, start = SERVERS[kind]
    if missing := [name for name in modules if find_spec(name) is None]:
        pytest.skip(f"needs {kind}, a server of the S3 protocol: {', '.join(missing)} not installed")
    with running(start, folder) as endpoint:
        yield Server(endpoint)


@contextmanager
def running_azurite(folder: Path) -> Iterator[Azurite]:
    """As `running_server`."""
    if shutil.which("azurite-blob") is None:
        pytest.skip("needs Azurite, a server of Azure's protocol: install it by `npm install -g azurite`")
    with running(AZURITE, folder) as endpoint:
        yield Azurite(endpoint)


@contextmanager
def running(start: str, folder: Path) -> Iterator[str]:
    """Gives the endpoint."""
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
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def wait_until_it_answers(process: subprocess.Popen[bytes], endpoint: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up and process.poll() is None:
        try:
            urlopen(endpoint).close()
            return
        except HTTPError as error:
            if error.code < 500:  # it is there, and refuses this one
                return
        except URLError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"the server does not answer at {endpoint}")


def environment(endpoint: str, scheme: str = "s3") -> dict[str, str]:
    """What a program needs to find it."""
    if scheme == "az":
        keys = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY}
        return {**keys, "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{ACCOUNT}", "AZURE_ALLOW_HTTP": "true"}
    if scheme == "gs":
        return {"GOOGLE_BEARER_TOKEN": BEARER, "GOOGLE_BASE_URL": endpoint, "GOOGLE_ALLOW_HTTP": "true"}
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    return {**keys, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}
