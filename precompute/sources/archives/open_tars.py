"""Tars whose indexes are in memory: a few, each opened once; at a URL some before they are asked for."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from cache_store.errors import EncodeOnceError
from precompute.sources.archives.image_tar import ImageTar

TARS_HELD = 4
"""Indexes in memory; of 10,000 samples with a text and a JSON each, one takes about 2 MB, and their texts some 15 while
they are planned. So many are read at the same time."""


class OpenTars:
    """Tars by name; for several threads, of which those that read neighbours wait for one index."""

    def __init__(self, names: list[str], open_tar: Callable[[str], ImageTar], *, are_far: bool) -> None:
        self._names, self._open, self._are_far = names, open_tar, are_far
        self._places = {name: place for place, name in enumerate(names)}
        self._tars = OrderedDict[str, Future[ImageTar]]()
        self._lock = threading.Lock()

    def in_order(self) -> Iterator[tuple[str, ImageTar]]:
        """All, one after the other; those at a URL are read ahead."""
        for place, name in enumerate(self._names):
            if self._are_far:
                self._read_ahead(self._names[place : place + TARS_HELD])
            yield name, self.get(name)

    def get(self, name: str) -> ImageTar:
        """The next one is read ahead where the one before it is here too: they are read in order."""
        tar, is_new = self._tar(name)
        if self._are_far and (place := self._places[name]) and self._names[place - 1] in self._tars:
            self._read_ahead(self._names[place + 1 : place + 2])
        if is_new:
            self._fill(tar, name)
        return tar.result()

    def _read_ahead(self, names: list[str]) -> None:
        for name in names:
            tar, is_new = self._tar(name)
            if is_new:  # by a thread that keeps no program that is stopped from ending
                threading.Thread(target=self._fill, args=(tar, name), daemon=True).start()

    def _tar(self, name: str) -> tuple[Future[ImageTar], bool]:
        """The tar, and whether it is for the caller to open it; one that could not be had is opened again."""
        with self._lock:
            tar = self._tars.get(name)
            if is_new := tar is None or bool(tar.done() and (tar.cancelled() or tar.exception())):
                tar = Future[ImageTar]()
            self._tars[name] = tar
            self._tars.move_to_end(name)
            while len(self._tars) > TARS_HELD:
                self._tars.popitem(last=False)
            return tar, is_new

    def _fill(self, tar: Future[ImageTar], name: str) -> None:
        """For whoever asks for it: the tar, or why it cannot be had."""
        try:
            tar.set_result(self._open(name))
        except (EncodeOnceError, OSError, RuntimeError) as error:  # RuntimeError: this process is ending
            tar.set_exception(error)
        finally:
            tar.cancel()  # where it is neither, nobody waits forever
