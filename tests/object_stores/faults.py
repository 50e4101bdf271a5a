"""A proxy on real sockets that makes chosen requests fail, as networks and servers do."""

import http.client
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import pytest

from cache_store.storage import objects, retry

Kind = Literal["500", "503", "429", "409", "reset", "lost", "hang", "cut", "short", "flip", "flip upload"]

REFUSALS = {
    "500": "InternalError",
    "503": "SlowDown",
    "429": "TooManyRequests",
    "409": "ConditionalRequestConflict",
}
"""Codes of errors that the proxy answers itself."""

NOW = struct.pack("ii", 1, 0)
"""SO_LINGER: closing resets the connection."""

HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}


Answer = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers and body."""


class Request(NamedTuple):
    method: str
    path: str
    sent: int
    """Bytes of the answer's."""


@dataclass
class Fault:
    """A failure of the matching requests number `first` to `first + times - 1`; with `each`, counted per address.

    reset: the connection is reset before the server gets the request. lost: it is reset after the server is done. hang:
    there is no answer. cut: half of the promised body is sent. short: half of the body is sent as if it were all. flip:
    one bit of the answer's body changes. flip upload: one bit of the request's body changes.
    """

    kind: Kind
    method: str
    part: str
    first: int
    times: int
    each: bool
    also: Callable[[], object]
    met: Counter[str] = field(default_factory=Counter)

    def meets(self, method: str, path: str) -> bool:
        if not re.fullmatch(self.method, method) or self.part not in path:
            return False
        address = path if self.each else ""
        self.met[address] += 1
        return self.first <= self.met[address] < self.first + self.times


@dataclass
class Proxy:
    """A proxy at `endpoint`; `requests` are those that it answered, in order."""

    server: str
    """Host and port of the server."""
    endpoint: str = ""
    requests: list[Request] = field(default_factory=list)
    _faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    def fail(
        self,
        kind: Kind,
        method: str,
        part: str = "",
        *,
        first: int = 1,
        times: int = 1,
        each: bool = False,
        also: Callable[[], object] = lambda: None,
    ) -> Fault:
        """Make requests of a method, such as `PUT|POST`, fail if path and query contain `part`; `also` is called at
        each.
        """
        self._faults.append(fault := Fault(kind, method, part, first, times, each, also))
        return fault

    def mend(self) -> None:
        """Pass everything on, and forget earlier requests."""
        with self._lock:
            self._faults.clear()
            self.requests.clear()

    def fault_of(self, method: str, path: str) -> Fault | None:
        with self._lock:
            met = [fault for fault in self._faults if fault.meets(method, path)]
        return met[0] if met else None


@contextmanager
def running_proxy(server: str, handler: "type[Handler] | None" = None) -> Iterator[Proxy]:
    proxy = Proxy(server.removeprefix("http://"))
    handler = type("Handler", (handler or Handler,), {"proxy": proxy})
    with Listener(("127.0.0.1", 0), handler) as listener:
        proxy.endpoint = f"http://127.0.0.1:{listener.server_port}"
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield proxy
        finally:
            proxy.over.set()
            listener.shutdown()
            thread.join()


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have closed the connection."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: Proxy

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chosen = self.proxy.fault_of(self.command, unquote(self.path))
        fault = chosen.kind if chosen else ""
        if chosen and fault != "lost":
            chosen.also()
        if fault == "hang":
            self.proxy.over.wait()
        if fault in ("reset", "hang"):
            return self.reset()
        if fault in REFUSALS:
            said = f"<Error><Code>{REFUSALS[fault]}</Code><Message>made by the test</Message></Error>".encode()
            return self.answer(int(fault), [("Content-Type", "application/xml")], said, len(said))
        status, headers, data = self.ask(self.command, flipped(body) if fault == "flip upload" else body)
        if chosen and fault == "lost":
            chosen.also()
            return self.reset()
        promised = len(data)
        if fault in ("cut", "short"):
            data = data[: len(data) // 2]
        if fault == "short":
            promised = len(data)
        return self.answer(status, headers, flipped(data) if fault == "flip" else data, promised)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

    def ask(self, method: str, body: bytes) -> Answer:
        connection = http.client.HTTPConnection(self.proxy.server)
        try:
            connection.putrequest(method, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, promised: int) -> None:
        self.proxy.requests.append(Request(self.command, unquote(self.path), len(data)))
        self.send_response_only(status)
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        for name, value in headers:
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        if self.command == "HEAD" and lengths:
            self.send_header("Content-Length", lengths[0])
        elif status != 204:
            self.send_header("Content-Length", str(promised))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.close_connection = len(data) < promised

    def reset(self) -> None:
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NOW)
        self.connection.close()
        self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        """Print nothing: `requests` has everything."""


def flipped(data: bytes) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[len(changed) // 2] ^= 1
    return bytes(changed)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up after a second or two what a program otherwise tries for most of a minute."""
    limits = {"CONNECT_S": 1, "ANSWER_S": 1}
    pauses = {"PATIENCE_S": 2.0, "FIRST_PAUSE_S": 0.02, "WARNED_EACH_S": 0}
    for module, values in ((objects, limits), (retry, pauses)):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
