"""The program that reads an object store for a forked process; see `forked.py`."""

import errno
import sys
from typing import IO

import msgspec

from cache_store.log import set_up_log
from cache_store.storage.objects.forked import Answer, Request, receive, send
from cache_store.storage.objects.object_store import ObjectStore


def serve(asked: IO[bytes], answers: IO[bytes]) -> None:
    """Until the one who asks has gone."""
    while (data := receive(asked)) is not None:
        request = msgspec.msgpack.decode(data, type=Request)
        try:
            answer = Answer(getattr(ObjectStore(request.url), request.method)(*request.arguments))
        except OSError as error:
            answer = Answer(error=(error.errno or errno.EIO, str(error.strerror), str(error.filename)))
        send(answers, answer)


if __name__ == "__main__":
    set_up_log("encode-once")
    serve(sys.stdin.buffer, sys.stdout.buffer)
