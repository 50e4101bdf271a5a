"""One thread per process, and object stores on loopback: servers per session, a bucket per test, a proxy between them.

Tests run in parallel, and more OpenMP threads than cores would wait for each other.
"""

import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver
from types import SimpleNamespace

import pytest

from tests.object_stores.faults import Proxy, running_proxy
from tests.object_stores.server import Google, Server, environment, running_azurite, running_server

# A shell ignores Ctrl-C in what it starts in the background, and so would all that tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Encoders use two threads all the same; with as many processes as cores, threads that spin for each other burn what
# others need: a toy encode took 8 ms of CPU time in place of 2. libgomp reads it when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray reads it once a process, and a driver that is of another mind than its cluster is not answered.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Captures our messages, at level info."""
    caplog.set_level(logging.INFO, "encode_once")
    return caplog


@pytest.fixture(scope="module")
def threads_as_in_a_child() -> Iterator[None]:
    """For runs compared bit for bit with child processes: an earlier build may have set two threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start workers of builds from a server that has the libraries loaded; tests of engines start them as users do."""
    from tests.forked import FORKED, Forked

    forkserver.ensure_running()  # now: a build that starts workers holds signals, which would be held for ever
    forked = SimpleNamespace(Pipe=FORKED.Pipe, Process=Forked)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forked)


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def s3_proxy(ministack: Server) -> Iterator[Proxy]:
    with running_proxy(ministack.endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def gs_proxy(ministack: Server) -> Iterator[Proxy]:
    with running_proxy(ministack.endpoint, Google) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def az_proxy(azurite: Server) -> Iterator[Proxy]:
    with running_proxy(azurite.endpoint) as proxy:
        yield proxy


@pytest.fixture
def scheme() -> str:
    """The scheme of `bucket`; tests parametrized by it run with other stores, too."""
    return "s3"


@pytest.fixture
def server(scheme: str, request: pytest.FixtureRequest) -> Server:
    """The server that has `bucket`."""
    server: Server = request.getfixturevalue("azurite" if scheme == "az" else "ministack")
    return server


@pytest.fixture
def proxy(scheme: str, request: pytest.FixtureRequest) -> Proxy:
    """The proxy before `server`; it passes everything on until a test chooses faults."""
    proxy: Proxy = request.getfixturevalue(f"{scheme}_proxy")
    proxy.mend()
    return proxy


@pytest.fixture(autouse=True)
def only_the_tests_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def bucket(scheme: str, server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new bucket; the environment has its endpoint, the proxy, and credentials."""
    pytest.importorskip("obstore", reason="needs obstore, of the extra object-stores")
    for name, value in environment(proxy.endpoint, scheme).items():
        monkeypatch.setenv(name, value)
    return f"{scheme}://{server.new_bucket()}"


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """A format other than plain also changes how other libraries log."""
    ours, root = logging.getLogger("encode_once"), logging.getLogger()
    handlers = ours.handlers, root.handlers
    yield
    logging.captureWarnings(False)
    ours.handlers, root.handlers = handlers
