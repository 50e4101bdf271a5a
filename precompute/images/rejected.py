"""The exception for a sample that cannot be cached, and the one for too many of them."""

from collections.abc import Iterator
from contextlib import contextmanager

from cache_store.errors import EncodeOnceError

ANY_ERROR = Exception
"""Libraries that decode raise errors of every class, for bytes that they did not expect or for lack of memory; one file
must not end more than itself.
"""


CONTINUE = "to continue without these samples, raise --run.max_reject_fraction"


class Rejected(Exception):  # noqa: N818 (an outcome of one sample, recorded, never a crash)
    """A sample cannot be cached; `kind` groups samples in counts, `detail` says more about this one."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.reason, self.kind, self.detail = str(self), kind, detail


@contextmanager
def rejecting(of_reader: type[Exception] = EncodeOnceError) -> Iterator[None]:
    """Turn the errors of libraries that decode one file into Rejected, but not those of the file's reader."""
    try:
        yield
    except (Rejected, EncodeOnceError, of_reader):
        raise
    except ANY_ERROR as error:
        details = " ".join(str(error).split()) or "no details"
        raise Rejected("cannot decode", f"{type(error).__name__}: {details}") from None


MAX_SIDE = 1_000_000
"""Pixels; every row costs Pillow some bytes of its own, however short it is."""


def refuse_many_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels or max(width, height) > MAX_SIDE:
        most = f"{max_pixels:,}, or than {MAX_SIDE:,} a side"
        raise Rejected("too large", f"{width} x {height} pixels, more than {most}")


class TooManyRejectsError(EncodeOnceError):
    """More samples are rejected than the config allows."""
