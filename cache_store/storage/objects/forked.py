"""Reading an object store in a process that was forked from one that had read it.

obstore's threads do not survive a fork, and its calls would wait for them for ever. So such a process, a worker of a
DataLoader say, starts a helper of its own, which reads for it: messages of msgpack through a pipe, each behind its
length. The helper ends with the pipe.
"""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import IO, Any, TypeVar, cast

import msgspec

from cache_store.storage.objects.client import is_forked

LENGTH_BYTES = 8

Method = TypeVar("Method", bound=Callable[..., Any])


class Request(msgspec.Struct, array_like=True):
    """One method of an `ObjectStore`, with its arguments."""

    url: str
    method: str
    arguments: list[Any]


class Answer(msgspec.Struct, array_like=True):
    """What it gave, or the OSError that it raised."""

    value: Any = None
    error: tuple[int, str, str] | None = None


def also_forked(method: Method) -> Method:
    """Of a store with a `url`: a method that the helper runs in place of a forked process."""

    @wraps(method)
    def run(store: Any, *arguments: Any) -> Any:
        return ask_helper(store.url, method.__name__, *arguments) if is_forked() else method(store, *arguments)

    return cast("Method", run)


def ask_helper(url: str, method: str, *arguments: Any) -> Any:
    """Its OSErrors are raised here."""
    answer = helper(os.getpid()).ask(Request(url, method, list(arguments)))
    if answer.error is not None:
        raise OSError(*answer.error)
    return answer.value


@lru_cache(maxsize=1)
def helper(process: int) -> "Helper":
    return Helper()


class Helper:
    """Threads take turns."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cache_store.storage.objects.reading_helper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for those whom it helps
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
    """None at the end."""
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    data = stream.read(length)
    return data if length and len(data) == length else None
