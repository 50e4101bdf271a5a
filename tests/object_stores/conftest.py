"""A server for the session, a bucket for a test, and between them a proxy that can make requests fail."""

import os
from collections.abc import Iterator

import pytest

from tests.object_stores.faults import Proxy, running_proxy
from tests.object_stores.server import Server, environment, running_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server("ministack", tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(scope="session")
def witness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server("moto", tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def session_proxy(server: Server) -> Iterator[Proxy]:
    with running_proxy(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(session_proxy: Proxy) -> Proxy:
    """Lets everything through until it is told otherwise."""
    session_proxy.mend()
    return session_proxy


@pytest.fixture(autouse=True)
def only_the_tests_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def bucket(server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new bucket, which the environment says how to reach: through the proxy."""
    pytest.importorskip("obstore", reason="needs obstore, of the extra object-stores")
    for name, value in environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    return f"s3://{server.new_bucket()}"
