"""Real servers of S3's and Azure's protocols on loopback, for as long as tests need them."""

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

from tests.object_stores.faults import Answer, Handler
from tests.slurm import free_port

PATIENCE_S = 60

WITH_ITS_PARENT = "import ctypes, runpy; ctypes.CDLL(None).prctl(1, 9);"
"""Lets a server die with the tests, even if they are killed: PR_SET_PDEATHSIG, SIGKILL."""

MINISTACK = "runpy.run_module('ministack', run_name='__main__')"
"""Keeps objects in memory. Refuses a second create, a stale etag and a wrong SHA-256, as S3 does; takes any key."""

AZURITE = "import os; os.execvp('azurite-blob', ['azurite-blob', '--blobPort', '{port}', '--inMemoryPersistence', "
AZURITE += "'--silent', '--disableTelemetry'])"
"""Microsoft's own server, which checks credentials; the process becomes node."""

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Account and key of every Azurite, from its documentation."""

BEARER = "token"
"""The token that the tests' GCS accepts."""

OTHERS = ("gs", "az")
EVERY_STORE = pytest.mark.parametrize("scheme", ["s3", *OTHERS])
"""Runs a test that uses `bucket` once for each kind of store."""

QUIET = {"LOG_LEVEL": "ERROR", "SFTP_ENABLED": "0", "IOT_MTLS_ENABLED": "0", "DOCKER_HOST": "unix:///nowhere"}
"""Makes ministack serve S3 only."""


@dataclass(frozen=True)
class Server:
    """A server at `endpoint`, by plain HTTP."""

    endpoint: str
    _buckets: "count[int]" = field(default_factory=lambda: count(1))

    def new_bucket(self) -> str:
        name = f"bucket-{next(self._buckets)}"
        with urlopen(self._creating(name)):
            return name

    def _creating(self, name: str) -> Request:
        return Request(f"{self.endpoint}/{name}", method="PUT")


class Azurite(Server):
    """A server whose buckets are containers of its one account."""

    def _creating(self, name: str) -> Request:
        """Return the request that makes a container, signed with the account's key."""
        known = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in known.items())]
        lines += [f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
        signed = hmac.digest(base64.b64decode(ACCOUNT_KEY), "\n".join(lines).encode(), "sha256")
        headers = {**known, "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"}
        return Request(f"{self.endpoint}/{ACCOUNT}/{name}?restype=container", method="PUT", headers=headers)


@contextmanager
def running_server(folder: Path) -> Iterator[Server]:
    """Run a server of S3's protocol with scratch files in `folder`; skip the test if it is not installed."""
    if find_spec("ministack") is None:
        pytest.skip("needs ministack, a server of the S3 protocol")
    with running(MINISTACK, folder) as endpoint:
        yield Server(endpoint)


@contextmanager
def running_azurite(folder: Path) -> Iterator[Azurite]:
    if shutil.which("azurite-blob") is None:
        pytest.skip("needs Azurite, a server of Azure's protocol: install it by `npm install -g azurite`")
    with running(AZURITE, folder) as endpoint:
        yield Azurite(endpoint)


@contextmanager
def running(start: str, folder: Path) -> Iterator[str]:
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
    if scheme == "az":
        keys = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY}
        return {**keys, "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{ACCOUNT}", "AZURE_ALLOW_HTTP": "true"}
    if scheme == "gs":
        return {"GOOGLE_BEARER_TOKEN": BEARER, "GOOGLE_BASE_URL": endpoint, "GOOGLE_ALLOW_HTTP": "true"}
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    return {**keys, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}


REFUSED = b"<Error><Code>AuthenticationRequired</Code><Message>Authentication required.</Message></Error>"


class Google(Handler):
    """GCS in tests: a translation of its XML API before a server of S3's protocol.

    No server of GCS's XML API with listings and uploads in parts can be installed. That API follows S3's; the
    differences are translated: conditional puts, credentials, and the answer to the deletion of a missing file. It
    cannot show what only GCS refuses.
    """

    def ask(self, method: str, body: bytes) -> Answer:
        if self.headers["Authorization"] != f"Bearer {BEARER}":
            return 401, [("Content-Type", "application/xml")], REFUSED
        del self.headers["Authorization"]
        if self.headers["x-goog-if-generation-match"] == "0":
            self.headers["If-None-Match"] = "*"
        if method == "DELETE" and (found := super().ask("GET", b""))[0] == 404:
            return found
        return super().ask(method, body)
