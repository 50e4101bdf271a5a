"""Serve a folder on loopback by the part of S3 that readers use (GET, ranges, HEAD, LIST), counting requests and bytes.

Test servers in Python that know all of S3 answer some 2,000 requests a second, which would limit the readers. This one
knows little of S3 and answers several times as many: run `python -m benchmarks.object_server FOLDER`. It checks no
credentials, and listens on 127.0.0.1 only. `--latency-ms` and `--connection-mb-per-s` make it as slow as a network.
"""

import argparse
import asyncio
import json
import mmap
import re
import subprocess
import sys
import urllib.request
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

BUCKET = "bench"
COUNTS = "/-/counts"
"""Path that answers with the requests and bytes since the last call."""

WRITTEN_BYTES = 256 << 10
"""Bytes written at a time; asyncio keeps a copy of whatever the connection does not take."""

MOST_WAITING = 1_024
"""Most connections waiting to be accepted; readers open hundreds at once."""

PAGE = 1_000
"""Most entries of a page of a listing, as in S3."""

RANGE = re.compile(rb"\r\nrange: *bytes=(\d*)-(\d*)", re.IGNORECASE)
LONG_AGO = "Thu, 01 Jan 1970 00:00:00 GMT"


class Network(NamedTuple):
    """The network that the server imitates."""

    latency_ms: float = 0
    """Time until an answer begins."""
    connection_mb_per_s: float = 0
    """Speed of one connection; 0: no limit."""

    def wait_s(self, num_bytes: int) -> float:
        return num_bytes / 1e6 / self.connection_mb_per_s if self.connection_mb_per_s else 0


class Counts(NamedTuple):
    requests: int
    sent_bytes: int
    """Bytes of response bodies."""


@contextmanager
def serving(folder: Path, network: Network) -> Iterator[str]:
    """Serve the folder in a separate process; yield its endpoint."""
    slowly = [f"--latency-ms={network.latency_ms}", f"--connection-mb-per-s={network.connection_mb_per_s}"]
    command = [sys.executable, "-m", "benchmarks.object_server", str(folder), *slowly]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def environment(endpoint: str) -> dict[str, str]:
    """Return the environment by which every reader finds the server, which ignores the keys."""
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    region = dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), "us-east-1")
    return {**keys, **region, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}


def take_counts(endpoint: str) -> Counts:
    with urllib.request.urlopen(endpoint + COUNTS) as answer:  # our own address
        return Counts(**json.load(answer))


class Server(asyncio.Protocol):
    """One connection; requests come one after another."""

    requests = 0
    sent_bytes = 0

    def __init__(self, root: Path, network: Network) -> None:
        self.root, self.network, self._received = root, network, b""
        self._left, self._is_full = memoryview(b""), False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=WRITTEN_BYTES)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head, self._received = self._received[:end], self._received[end + 4 :]
            after(self.network.latency_ms / 1_000, self._answer, head)

    def _answer(self, head: bytes) -> None:
        method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        path, _, query = target.partition("?")
        if path == COUNTS:
            body = json.dumps(Counts(Server.requests, Server.sent_bytes)._asdict()).encode()
            Server.requests = Server.sent_bytes = 0
            return self.transport.write(head_of("200 OK", len(body)) + body)
        Server.requests += 1
        if "list-type=2" in query:
            body = listing(self.root, parse_qs(query))
            return self._send("200 OK", memoryview(body), len(body))
        try:
            data = mapped(self.root, path)
        except OSError:
            body = b"<Error><Code>NoSuchKey</Code></Error>"
            return self._send("404 Not Found", memoryview(body), len(body))
        if method == "HEAD":
            return self.transport.write(head_of("200 OK", len(data)))
        if found := RANGE.search(head):
            first, last = range_of(found[1], found[2], len(data))
            part = data[first : last + 1]
            return self._send("206 Partial Content", part, len(part), f"bytes {first}-{last}/{len(data)}")
        return self._send("200 OK", data, len(data))

    def _send(self, status: str, body: memoryview, length: int, content_range: str = "") -> None:
        Server.sent_bytes += length
        after(self.network.wait_s(len(body[:WRITTEN_BYTES])), self._begin, head_of(status, length, content_range), body)

    def _begin(self, head: bytes, body: memoryview) -> None:
        self.transport.write(head + body[:WRITTEN_BYTES])
        self._left = body[WRITTEN_BYTES:]
        self._write_later()

    def _write_later(self) -> None:
        if self._left and not self._is_full:
            wait_s = self.network.wait_s(len(self._left[:WRITTEN_BYTES]))
            asyncio.get_running_loop().call_later(wait_s, self._write)

    def _write(self) -> None:
        self.transport.write(self._left[:WRITTEN_BYTES])
        self._left = self._left[WRITTEN_BYTES:]
        self._write_later()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._write_later()


def after(seconds: float, call: Callable[..., None], *arguments: object) -> None:
    if seconds:
        asyncio.get_running_loop().call_later(seconds, call, *arguments)
    else:
        call(*arguments)


def head_of(status: str, length: int, content_range: str = "") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {length}", f"Last-Modified: {LONG_AGO}", 'ETag: "0"']
    lines += ["Accept-Ranges: bytes"] + [f"Content-Range: {content_range}"] * bool(content_range)
    return "\r\n".join([*lines, "", ""]).encode()


def range_of(first: bytes, last: bytes, size: int) -> tuple[int, int]:
    """Return the first and the last byte that a range asks for."""
    if not first:
        return max(0, size - int(last)), size - 1
    return int(first), min(int(last), size - 1) if last else size - 1


@lru_cache(maxsize=4_096)
def mapped(root: Path, target: str) -> memoryview:
    path = root / unquote(target).removeprefix(f"/{BUCKET}/")
    with path.open("rb") as stream:
        if not path.stat().st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


@lru_cache(maxsize=1)
def keys_of(root: Path) -> list[str]:
    """List the folder once: nothing may be added while it is listed by clients."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def listing(root: Path, query: dict[str, list[str]]) -> bytes:
    """Return a page of everything under a prefix, up to a delimiter if one is given; a page's token is its last key."""
    prefix, delimiter, token = (query.get(name, [""])[0] for name in ("prefix", "delimiter", "continuation-token"))
    after, keys = token or query.get("start-after", [""])[0], keys_of(root)
    entries, last, is_cut = dict[str, None](), "", False
    for key in keys[bisect_left(keys, prefix) if after < prefix else bisect_right(keys, after) :]:
        if not key.startswith(prefix):
            break
        folder, slash, _ = key[len(prefix) :].partition("/")
        if delimiter and slash:
            entry = f"<CommonPrefixes><Prefix>{escape(prefix + folder)}/</Prefix></CommonPrefixes>"
        else:
            about = f"<ETag>0</ETag><Size>{(root / key).stat().st_size}</Size><StorageClass>STANDARD</StorageClass>"
            modified = "<LastModified>1970-01-01T00:00:00.000Z</LastModified>"
            entry = f"<Contents><Key>{escape(key)}</Key>{modified}{about}</Contents>"
        if is_cut := entry not in entries and len(entries) == PAGE:
            break
        entries[entry], last = None, key
    about = f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(entries)}</KeyCount>"
    about += f"<MaxKeys>{PAGE}</MaxKeys><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
    about += f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" * is_cut
    return f'<?xml version="1.0"?><ListBucketResult>{about}{"".join(entries)}</ListBucketResult>'.encode()


async def serve(root: Path, network: Network) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Server(root, network), "127.0.0.1", 0, backlog=MOST_WAITING)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def add_network_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--latency-ms", type=float, default=0, help="before each answer")
    parser.add_argument(
        "--connection-mb-per-s", type=float, default=0, help="speed of each connection; default: no limit"
    )


def network_of(options: argparse.Namespace) -> Network:
    return Network(options.latency_ms, options.connection_mb_per_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    add_network_options(parser)
    options = parser.parse_args()
    asyncio.run(serve(options.folder, network_of(options)))
