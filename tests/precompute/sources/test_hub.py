"""Data sets on the Hub as sources, from a server on loopback that answers as the Hub does."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

from precompute.sources import SourceConfig, open_source
from tests.precompute.sources.test_parquet import write_dataset

READ_ALL = """
import hashlib, sys
from cache_store.program.run_program import run_program
from precompute.sources import SourceConfig, open_source

def run(words):
    source = open_source(SourceConfig(kind="parquet", path=words[0]))
    for sample in source.samples():
        print(sample["uri"], hashlib.sha256(source.read(sample["uri"])).hexdigest(), sample["fingerprint"])
    return 0

sys.exit(run_program("precompute", run, None))
"""


class Hub(BaseHTTPRequestHandler):
    """One data set, me/pictures, whose files lie in `root`."""

    protocol_version = "HTTP/1.1"
    root: Path

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        if path == "/api/datasets/me/pictures" or path.startswith("/api/datasets/me/pictures/revision/"):
            return self.say({"id": "me/pictures", "sha": "0" * 40, "siblings": []})
        if found := re.fullmatch("/api/datasets/me/pictures/tree/main/?(.*)", path):
            if not (folder := self.root / found[1]).is_dir():
                return self.answer(404, b"{}", ("X-Error-Code", "EntryNotFound"))
            return self.say([*map(self.entry, sorted(folder.iterdir()))])
        if found := re.fullmatch("/datasets/me/pictures/resolve/main/(.*)", path):
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            return self.answer(206, (self.root / found[1]).read_bytes()[first : last + 1])
        return self.answer(404, b"{}", ("X-Error-Code", "RepoNotFound"))

    def entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.root).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": "d", "size": 0, "path": name}
        data = path.read_bytes()
        return {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}

    def say(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), ("Content-Type", "application/json"))

    def answer(self, status: int, data: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(data)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    root = tmp_path_factory.mktemp("hub")
    for place, numbers in enumerate(((9, 1, 2), (3, 4, 5, 6, 7))):
        write_dataset(root / f"data/train-{place}.parquet", *numbers)
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Hub,), {"root": root})) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", root
        server.shutdown()
        thread.join()


def read_all(url: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", READ_ALL, url], env={**os.environ, **environment}, capture_output=True, text=True
    )


@pytest.mark.parametrize("path", ["data/train-*.parquet", "data"])
def test_tables_on_the_hub_are_those_on_disk(hub, path):
    endpoint, root = hub
    done = read_all(f"hf://datasets/me/pictures/{path}", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    source = open_source(SourceConfig(kind="parquet", path=str(root / path)))
    uris = [str(sample["uri"]) for sample in source.samples()]
    here = [(uri, hashlib.sha256(source.read(uri)).hexdigest()) for uri in uris]
    assert [tuple(line.split()[:2]) for line in done.stdout.splitlines()] == here, done.stderr
    sha1 = hashlib.sha1((root / "data/train-0.parquet").read_bytes()).hexdigest()
    assert done.stdout.splitlines()[0].endswith(f":{sha1}")


def test_what_the_hub_refuses_is_one_line(hub):
    endpoint, _ = hub
    online = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    for url, environment, code, said in (
        ("hf://datasets/me/others/a.parquet", online, 1, "no such data set .* check its name and HF_TOKEN"),
        ("hf://datasets/me/pictures/data/9.parquet", online, 2, "9.parquet holds no .parquet file"),
        (
            "hf://models/me/pictures/a.parquet",
            online,
            2,
            "of the Hub only data sets are read; name hf://datasets/OWNER/NAME/",
        ),
        ("hf://datasets/me/pictures/a.parquet", {"HF_HUB_OFFLINE": "1"}, 1, "the Hub cannot be read: check"),
    ):
        done = read_all(url, **environment)
        assert done.returncode == code, done.stderr
        assert re.search(f"^precompute: error: .*{said}", done.stderr)
        assert done.stderr.count("\n") == 1
