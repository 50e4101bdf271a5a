"""Read an object store in a process that was forked from one that had used it, such as a DataLoader's worker.

obstore's threads do not survive a fork, and its calls would wait for them for ever. So a forked process starts a helper
process (this module as a program) that reads for it. They exchange msgpack messages, each after its length, through
pipes; the helper ends when its pipe is closed.
"""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any

import msgspec

from cache_store.errors import ChangedError, TooLargeError
from cache_store.log import set_up_log
from cache_store.storage.objects import ObjectStore, is_forked
from cache_store.storage.remote import WrappedStore
from cache_store.storage.retrying import RetryingStore
from cache_store.storage.verbs import MAX_READ_BYTES, Ranges, Version, too_large_error

LENGTH_BYTES = 8
"""Bytes of the length before each message."""


@dataclass(frozen=True)
class ForkedStore(WrappedStore):
    """An object store; in a forked process, a helper process runs the verbs that read."""

    def stat(self, name: str) -> Version:
        return Version(*self._ask_helper("stat", name)) if is_forked() else self.inner.stat(name)

    def read(self, name: str, at_most: int = MAX_READ_BYTES) -> bytes:
        if not is_forked():
            return self.inner.read(name, at_most)
        data: bytes = self._ask_helper("read", name, at_most)
        return data

    def fetch(self, wanted: Sequence[Ranges]) -> Sequence[Sequence[memoryview]]:
        if not is_forked():
            return self.inner.fetch(wanted)
        return [[memoryview(part) for part in each] for each in self._ask_helper("fetch", [*wanted])]

    def list(self, folder: str = "") -> list[str]:
        return [*self._ask_helper("list", folder)] if is_forked() else self.inner.list(folder)

    def walk(self, after: str = "") -> Iterator[tuple[str, Version | None]]:
        if not is_forked():
            return self.inner.walk(after)
        return ((name, version and Version(*version)) for name, version in self._ask_helper("walk", after))

    def _ask_helper(self, verb: str, *arguments: Any) -> Any:
        """Return the helper's result, or raise its error."""
        answer = helper_of(os.getpid()).ask(Request(str(self), verb, list(arguments)))
        if answer.error is not None:
            raise OSError(*answer.error)
        if answer.changed:
            raise ChangedError(answer.changed)
        if answer.too_large is not None:
            raise too_large_error(*answer.too_large)
        return answer.value


class Request(msgspec.Struct, array_like=True):
    """A verb of an object store, with its arguments."""

    url: str
    verb: str
    arguments: list[Any]


class Answer(msgspec.Struct, array_like=True):
    """The verb's result, or the error that it raised."""

    value: Any = None
    error: tuple[int, str, str] | None = None
    """Number, text and file of an OSError."""
    changed: str = ""
    """Text of a ChangedError."""
    too_large: tuple[str, int, int] | None = None
    """File, size and limit of a TooLargeError."""


@lru_cache(maxsize=1)
def helper_of(process: int) -> "Helper":
    return Helper()


class Helper:
    """A helper process and the pipes to it; threads take turns."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cache_store.storage.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C must not reach the helper, only the processes that it serves
        )

    def ask(self, request: Request) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._turn:
            send(self._process.stdin, request)
            data = receive(self._process.stdout)
        if data is None:
            return Answer(error=(errno.EIO, "the helper that reads for this forked process has died", request.url))
        return msgspec.msgpack.decode(data, type=Answer)


def send(stream: IO[bytes], message: Request | Answer) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(LENGTH_BYTES, "little"))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """Read one message; None at the end of the stream."""
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    data = stream.read(length)
    return data if length and len(data) == length else None


def parse_ranges(given: list[list[Any]]) -> list[Ranges]:
    return [Ranges(*each)._replace(version=version and Version(*version)) for *each, version in given]


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until the pipe is closed."""
    while (data := receive(requests)) is not None:
        request = msgspec.msgpack.decode(data, type=Request)
        store = RetryingStore(ObjectStore(request.url))
        try:
            answer = Answer(run_verb(store, request))
        except OSError as error:
            answer = Answer(error=(error.errno or errno.EIO, str(error.strerror), str(error.filename)))
        except ChangedError as error:
            answer = Answer(changed=str(error))
        except TooLargeError as error:
            name, at_most = request.arguments
            answer = Answer(too_large=(store.where(name), error.size, at_most))
        send(answers, answer)


def run_verb(store: RetryingStore, request: Request) -> Any:
    if request.verb == "fetch":
        return store.fetch(parse_ranges(*request.arguments))
    found = getattr(store, request.verb)(*request.arguments)
    return [*found] if request.verb == "walk" else found


if __name__ == "__main__":
    set_up_log("encode-once")
    serve(sys.stdin.buffer, sys.stdout.buffer)
