"""A server on loopback that answers like the Hugging Face Hub, for one data set of files on disk."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

DATA_SET = "hf://datasets/me/pictures"


@contextmanager
def running_hub(root: Path) -> Iterator[str]:
    """Serve the files of a folder as DATA_SET; yield the endpoint."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Hub,), {"root": root})) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Hub(BaseHTTPRequestHandler):
    """Answers for the data set me/pictures, whose files are in `root`; for me/portal it asks for a login."""

    protocol_version = "HTTP/1.1"
    root: Path

    def do_GET(self) -> None:
        path, is_deep = unquote(urlparse(self.path).path), "recursive=true" in self.path.lower()
        if path.startswith("/api/datasets/me/portal"):  # a network that wants a login first
            return self.answer(200, b"<html>Sign in</html>", ("Content-Type", "text/html"))
        if path == "/api/datasets/me/pictures" or path.startswith("/api/datasets/me/pictures/revision/"):
            return self.say({"id": "me/pictures", "sha": "0" * 40, "siblings": []})
        if found := re.fullmatch("/api/datasets/me/pictures/tree/main/?(.*)", path):
            if not (folder := self.root / found[1]).is_dir():
                return self.answer(404, b"{}", ("X-Error-Code", "EntryNotFound"))
            return self.say([*map(self.entry, sorted(folder.rglob("*") if is_deep else folder.iterdir()))])
        if found := re.fullmatch("/datasets/me/pictures/resolve/main/(.*)", path):
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            return self.answer(206, (self.root / found[1]).read_bytes()[first : last + 1])
        return self.answer(404, b"{}", ("X-Error-Code", "RepoNotFound"))

    def do_POST(self) -> None:
        """Answer which of some paths there are, as some releases of huggingface_hub ask."""
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        self.say([self.entry(path) for path in (self.root / each for each in asked) if path.exists()])

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
        """Print nothing."""
