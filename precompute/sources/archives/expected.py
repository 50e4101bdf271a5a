"""Images that are each a file at a URL, fetched before they are asked for: an answer takes longer than a decoding."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from cache_store.storage.objects.client import pool

AHEAD = 32
"""Images in flight or in memory, of some 100 KB each: 1,600 a second from a store that takes 20 ms for an answer."""


Expect = Callable[[Iterable[str]], None]
"""Is told the names that will be read, once each and about in this order."""


def expecting(images: object) -> Expect:
    """Their `expect`; of images that lie near, or come in blocks, nothing."""
    expect: Expect = getattr(images, "expect", begin_nothing)
    return expect


def begin_nothing(names: Iterable[str]) -> None:
    pass


class ExpectedReads:
    """Reads by name that are begun ahead, a few at a time."""

    def __init__(self, read: Callable[[str], bytes]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._coming = deque[str]()
        self._begun = dict[str, Future[bytes]]()

    def expect(self, names: Iterable[str]) -> None:
        with self._lock:
            self._coming.extend(names)
            self._begin()

    def read(self, name: str) -> bytes:
        """What was read ahead, or is now; errors are raised here."""
        with self._lock:
            begun = self._begun.pop(name, None)
            if begun is None and name in self._coming:
                self._coming.remove(name)
            self._begin()
        return begun.result() if begun else self._read(name)

    def _begin(self) -> None:
        while self._coming and len(self._begun) < AHEAD:
            if (name := self._coming.popleft()) not in self._begun:  # a list may name an image twice
                self._begun[name] = pool().submit(self._read, name)
